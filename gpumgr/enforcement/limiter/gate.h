/* What gate.c and streams.c offer each other. */
#ifndef GPUMGR_GATE_H
#define GPUMGR_GATE_H
#include "library.h"

enum { GM_RING = 8 }; /* markers of a stream */

/* This process's launches on one GPU. */
struct gm_gate {
    _Atomic(uint64_t) passes; /* from bit 16: launches that passed; below: those of them that the driver has not answered */
    atomic_int waiting;       /* threads that wait for the turn */
    atomic_bool busy;     /* as GM_BUSY in this process's word */
    atomic_bool no_arbiter; /* when a launch that needs no turn last looked */
    atomic_uint periods;  /* in which it was busy */
    _Atomic(uint64_t) last_ns;
    uint64_t published; /* passes that are in the use page */
    uint64_t ended_ns; /* the helper found all work ended, after so many passes; 0: not yet */
    uint64_t ended_passes;
    int64_t bucket_ns; /* without an arbiter */
    bool bucket_open;  /* until it is empty; again when it has some */
    uint64_t bucket_at_ns;
};

/* A stream and its markers: events behind some of its launches. A stream that the program destroyed is followed until its work ended;
 * a stream of a destroyed context is forgotten. */
enum gm_stream_state { GM_UNUSED, GM_LIVE, GM_DESTROYED };
struct gm_stream {
    struct gm_stream *next; /* never freed, so a thread may keep its address */
    atomic_int state;
    atomic_flag held; /* by the thread that records or reads markers */
    _Atomic(CUstream) handle;
    _Atomic(CUcontext) context;
    atomic_int device;
    atomic_uint thread;             /* of a per-thread default stream; 0: others */
    _Atomic(struct gm_gate *) gate; /* NULL: the GPU is not limited */
    atomic_uint unmarked; /* launches behind the last marker */
    atomic_uint spacing;  /* launches between two markers */
    uint32_t depth;       /* markers that may be open while the program launches on */
    uint32_t first, next_marker;
    CUevent event[GM_RING];
    uint32_t covers[GM_RING]; /* launches since the marker before */
    uint32_t period[GM_RING]; /* gm_gate.periods then */
};

struct gm_gate *gm_gate_of(int gpu);
/* How long a launch waits for earlier work to end. */
uint64_t gm_patience_ns(const struct gm_gate *gate);

/* The stream of a handle in the current context, or NULL: the driver would refuse it. */
struct gm_stream *gm_stream_of(CUstream handle, bool per_thread);
/* Records a marker behind the last launch; waits first while too much work is queued. */
void gm_stream_mark(struct gm_stream *stream);
bool gm_stream_captures(CUstream handle, bool per_thread);
/* Has all work behind the gate ended? Records markers where some work has none yet. */
bool gm_streams_ended(struct gm_gate *gate);
#endif
