/* What gate.c and streams.c offer each other. */
#ifndef GPUMGR_GATE_H
#define GPUMGR_GATE_H
#include "library.h"

enum { GM_RING = 8 }; /* markers of a stream at most */

/* The gate of one GPU: this process's launches there pass it. */
struct gm_gate {
    _Atomic(uint64_t) passes; /* from bit 16: launches that passed; below: how many of them are inside the driver's call */
    atomic_int waiting;       /* threads that wait for the turn */
    atomic_bool busy;     /* as GM_BUSY in this process's word */
    atomic_bool no_arbiter; /* there was no arbiter when a launch that needs no turn last looked */
    atomic_uint periods;  /* how often it became busy */
    _Atomic(uint64_t) last_ns; /* when the last launch passed */
    uint64_t published; /* how many of the launches the use page has counted */
    uint64_t ended_ns; /* since when the helper has found all work ended; 0: it has not */
    uint64_t ended_passes; /* `passes` at that time */
    int64_t bucket_ns; /* without an arbiter: the GPU time that launches may still use */
    bool bucket_open;  /* launches may pass: until the bucket is empty, and again once it has a quarter of a quantum */
    uint64_t bucket_at_ns;
};

/* A stream and its markers: events that are recorded behind some of its launches. A stream that the program destroyed is followed until
 * its work has ended. A stream of a destroyed context is forgotten. */
enum gm_stream_state { GM_UNUSED, GM_LIVE, GM_DESTROYED };
struct gm_stream {
    struct gm_stream *next; /* never freed, so a thread may keep its address */
    atomic_int state;
    atomic_flag held; /* a thread records or reads markers */
    int cancel;       /* the cancellation state of the thread that holds it, before */
    _Atomic(CUstream) handle;
    _Atomic(CUcontext) context;
    atomic_int device;
    atomic_uint thread;             /* the thread of a per-thread default stream; 0: another stream */
    _Atomic(struct gm_gate *) gate; /* NULL: the GPU is not limited */
    atomic_uint unmarked; /* launches behind the last marker */
    atomic_uint spacing;  /* launches between two markers */
    uint32_t depth;       /* how many markers may be recorded that the GPU has not reached; then a launch waits */
    uint32_t first, next_marker; /* the first marker that was not found ended, and the next one; they only grow, for gm_point */
    uint32_t oldest;             /* the first marker of this stream */
    CUevent event[GM_RING];
    uint32_t covers[GM_RING]; /* launches between the marker before and this one */
    uint32_t period[GM_RING]; /* gm_gate.periods when the marker was recorded */
};

struct gm_gate *gm_gate_of(int gpu);
/* How long a launch waits at most while too much work is queued before it. */
uint64_t gm_patience_ns(const struct gm_gate *gate);

/* The stream of a handle in the current context; NULL: the driver would refuse the handle, or the stream can't be followed. */
struct gm_stream *gm_stream_of(CUstream handle, bool per_thread);
/* Records a marker behind the last launch; waits first while too much work is queued. */
void gm_stream_mark(struct gm_stream *stream);
/* Whether all work of this process on the gate's GPU has ended. Records markers behind work that has none yet. */
bool gm_streams_ended(struct gm_gate *gate);
#endif
