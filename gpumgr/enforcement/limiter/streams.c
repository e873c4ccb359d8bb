/* Streams and markers: which work of this process on the GPUs has not ended. A marker is an event that the library records in the program's
 * own stream.
 *
 * The flag `held` of a stream protects its markers. The helper does not wait for the flag, but tries again later. A launch waits only if
 * its stream is a per-thread one or has many launches without a marker. A thread waits for the flag for about 100 ms at most. */
#define _GNU_SOURCE
#include "gate.h"
#include "old_glibc.h"
#include <pthread.h>
#include <stdlib.h>

#define LEGACY ((CUstream)1)
#define PER_THREAD ((CUstream)2)
enum {
    MOST_SPACING = 256, /* launches between two markers */
    MOST_UNENDED = 512, /* launches that all markers ahead of the work may cover together */
    MOST_DEPTH = 4,     /* markers ahead of the work */
    MARKER_US = 1000,   /* the work that one marker shall cover */
    AHEAD_US = 4000,    /* the work that may be queued ahead */
    NAP_NS = 100000,    /* between two attempts to get the flag `held`, or to record a marker */
};

static struct {
    CUresult (*event_create)(CUevent *, unsigned), (*event_destroy)(CUevent), (*record)(CUevent, CUstream), (*record_per_thread)(CUevent, CUstream);
    CUresult (*query)(CUevent), (*elapsed)(float *, CUevent, CUevent), (*get_current)(CUcontext *), (*push)(CUcontext), (*pop)(CUcontext *);
    CUresult (*stream_context)(CUstream, CUcontext *), (*capturing)(CUstream, int *), (*capturing_per_thread)(CUstream, int *);
    CUresult (*get_device)(CUdevice *);
} cuda;
static atomic_bool complete;
static _Atomic(struct gm_stream *) streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for changes of the list */
static atomic_int captures;
static atomic_uint threads;
/* With this model, access to the variables needs no call of the loader. */
#define THREAD_OWN static __thread __attribute__((tls_model("initial-exec")))
THREAD_OWN uint32_t this_thread;
THREAD_OWN struct gm_stream *last_used;

static bool load_functions(void) {
    if (atomic_load_explicit(&complete, memory_order_acquire)) return true;
    static const struct { void **to; const char *symbol, *older; } functions[] = {
        {(void **)&cuda.event_create, "cuEventCreate", NULL}, {(void **)&cuda.event_destroy, "cuEventDestroy_v2", NULL},
        {(void **)&cuda.record, "cuEventRecord", NULL}, {(void **)&cuda.record_per_thread, "cuEventRecord_ptsz", NULL},
        {(void **)&cuda.query, "cuEventQuery", NULL}, {(void **)&cuda.elapsed, "cuEventElapsedTime_v2", "cuEventElapsedTime"},
        {(void **)&cuda.get_current, "cuCtxGetCurrent", NULL}, {(void **)&cuda.push, "cuCtxPushCurrent_v2", NULL},
        {(void **)&cuda.pop, "cuCtxPopCurrent_v2", NULL}, {(void **)&cuda.stream_context, "cuStreamGetCtx", NULL},
        {(void **)&cuda.capturing, "cuStreamIsCapturing", NULL}, {(void **)&cuda.capturing_per_thread, "cuStreamIsCapturing_ptsz", NULL},
        {(void **)&cuda.get_device, "cuCtxGetDevice", NULL},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = gm_driver_function(functions[i].symbol);
        if (!found && functions[i].older) found = gm_driver_function(functions[i].older);
        if (!found) return false;
        *functions[i].to = found;
    }
    atomic_store_explicit(&complete, true, memory_order_release);
    return true;
}

/* A thread can't be cancelled while it holds a stream. Otherwise the stream would be held for ever. */
static bool hold(struct gm_stream *s) {
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    if (!atomic_flag_test_and_set_explicit(&s->held, memory_order_acquire)) return s->cancel = before, true;
    pthread_setcancelstate(before, NULL);
    return false;
}
static void let_go(struct gm_stream *s) {
    int before = s->cancel;
    atomic_flag_clear_explicit(&s->held, memory_order_release);
    pthread_setcancelstate(before, NULL);
}
static bool hold_soon(struct gm_stream *s) {
    for (int i = 0; i < 1000; i++) {
        if (hold(s)) return true;
        gm_nap(NAP_NS);
    }
    return false;
}

/* -- markers; each with the stream held ----------------------------------------------------------------------------------------- */
/* Call it when the work before a marker has ended. Sets how many launches a marker covers (about a millisecond of work), and how many
 * markers may be ahead of the work. Markers with a pause between them are not measured. */
static void adapt(struct gm_stream *s, uint32_t marker) {
    float ms = 0;
    if (marker == s->oldest || s->period[(marker - 1) % GM_RING] != s->period[marker % GM_RING]) return;
    if (cuda.elapsed(&ms, s->event[(marker - 1) % GM_RING], s->event[marker % GM_RING]) != CUDA_SUCCESS) return;
    uint32_t us = ms < 0.001f ? 1 : ms > 1e6f ? 1000000000 : (uint32_t)(ms * 1000), covers = s->covers[marker % GM_RING];
    uint32_t depth = AHEAD_US / us, spacing = (uint32_t)((uint64_t)MARKER_US * (covers ? covers : 1) / us), before = atomic_load(&s->spacing);
    if (spacing > 2 * before) spacing = 2 * before;
    if (spacing < before / 2) spacing = before / 2;
    spacing = spacing < 1 ? 1 : spacing > MOST_SPACING ? MOST_SPACING : spacing;
    if (depth > MOST_UNENDED / spacing) depth = MOST_UNENDED / spacing; /* since the next kernels may take longer */
    s->depth = depth < 1 ? 1 : depth > MOST_DEPTH ? MOST_DEPTH : depth;
    atomic_store(&s->spacing, spacing);
}
static void collect(struct gm_stream *s) {
    for (; s->first != s->next_marker; s->first++) {
        if (cuda.query(s->event[s->first % GM_RING]) == CUDA_ERROR_NOT_READY) return;
        adapt(s, s->first);
    }
}
/* Records a marker. False: none is free. The last marker that has ended is not free: adapt measures the time from it to the next one. No
 * other thread can mark a per-thread stream, so its last marker moves behind each launch until it covers `spacing` launches. With `most` =
 * GM_RING the last marker of any stream moves if none is free. */
static bool record(struct gm_stream *s, uint32_t most) {
    uint32_t open = s->next_marker - s->first, last = (s->next_marker - 1) % GM_RING;
    bool moves = open >= GM_RING - 1 ? s->thread || most == GM_RING : s->thread && open && s->covers[last] < atomic_load(&s->spacing);
    if (open >= most && !moves) return false;
    if (moves) s->next_marker--;
    uint32_t at = s->next_marker % GM_RING, covers = atomic_exchange(&s->unmarked, 0) + (moves ? s->covers[last] : 0);
    CUresult r;
    if (s->thread) r = cuda.record_per_thread(s->event[at], PER_THREAD);
    else {
        CUcontext popped;
        bool pushed = s->handle == LEGACY && cuda.push(s->context) == CUDA_SUCCESS;
        r = cuda.record(s->event[at], s->handle);
        if (pushed) cuda.pop(&popped);
    }
    if (r != CUDA_SUCCESS) {
        /* The context is broken, or the handle belongs to another stream now. The events can serve another stream of the context. */
        s->first = s->next_marker;
        atomic_store(&s->state, GM_DESTROYED);
        return true;
    }
    s->covers[at] = covers;
    s->period[at] = atomic_load(&s->gate->periods);
    s->next_marker++;
    return true;
}

bool gm_stream_captures(CUstream handle, bool per_thread) {
    int status = 0;
    if (!atomic_load_explicit(&captures, memory_order_relaxed) || !load_functions()) return false;
    return (per_thread ? cuda.capturing_per_thread : cuda.capturing)(handle, &status) != CUDA_SUCCESS || status;
}

void gm_stream_mark(struct gm_stream *s) {
    uint64_t until = 0;
    int mode = gm_relax(); /* another thread may begin a capture at any time */
    /* If another thread holds the stream, that thread records the marker. It may have lost its CPU, so only some launches rely on it. */
    while (s->thread || atomic_load(&s->unmarked) > 4 * atomic_load(&s->spacing) ? hold_soon(s) : hold(s)) {
        bool late = until && gm_now() > until, done = atomic_load(&s->state) != GM_LIVE || record(s, s->depth);
        if (!done) collect(s), done = record(s, late ? GM_RING - 1 : s->depth);
        let_go(s);
        if (done || late || gm_suspended()) break;
        if (!until) until = gm_now() + gm_patience_ns(s->gate);
        gm_nap(NAP_NS);
    }
    gm_unrelax(mode);
}

bool gm_streams_ended(struct gm_gate *gate) {
    bool ended = true;
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next) {
        int state = atomic_load(&s->state);
        if (state == GM_UNUSED || s->gate != gate) continue;
        if (!hold(s)) {
            ended = false;
            continue;
        }
        if ((state = atomic_load(&s->state)) != GM_UNUSED) collect(s);
        if (state == GM_LIVE && !s->thread && atomic_load(&s->unmarked) && !gm_stream_captures(s->handle, false))
            ended &= record(s, GM_RING - 1) && atomic_load(&s->state) != GM_LIVE;
        if (atomic_load(&s->state) != GM_UNUSED && s->first != s->next_marker) ended = false;
        let_go(s);
    }
    return ended;
}

/* While launches wait for free markers, one more marker would delay them. Then none is recorded here, and the point ends at the next
 * marker, of a launch or of gm_passed. */
struct gm_point gm_point_in(CUstream handle, bool per_thread) {
    struct gm_stream *s = gm_stream_captures(handle, per_thread) ? NULL : gm_stream_of(handle, per_thread);
    struct gm_point point = {NULL, 0};
    if (!s || !s->gate || !hold_soon(s)) return point;
    int mode = gm_relax();
    if (atomic_load(&s->state) == GM_LIVE) {
        atomic_fetch_add(&s->unmarked, 1);
        bool recorded = record(s, atomic_load(&s->gate->busy) && !s->thread ? 1 : GM_RING - 1);
        point = (struct gm_point){s, s->next_marker - recorded};
    }
    gm_unrelax(mode);
    let_go(s);
    return point;
}
bool gm_passed(struct gm_point point) {
    struct gm_stream *s = point.stream;
    if (!s) return true;
    if (!hold_soon(s)) return false;
    int mode = gm_relax();
    if (atomic_load(&s->state) != GM_UNUSED) collect(s);
    bool lacks = point.marker == s->next_marker && !s->thread && atomic_load(&s->state) == GM_LIVE;
    if (lacks && !gm_stream_captures(s->handle, false)) record(s, GM_RING - 1);
    int state = atomic_load(&s->state);
    bool passed = state == GM_UNUSED || (state == GM_DESTROYED && s->first == s->next_marker) || (int32_t)(s->first - point.marker) > 0;
    gm_unrelax(mode);
    let_go(s);
    return passed;
}

/* -- the list -------------------------------------------------------------------------------------------------------------------- */
static struct gm_stream *find(CUstream handle, CUcontext context, uint32_t thread) {
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next)
        if (atomic_load(&s->state) == GM_LIVE && s->handle == handle && s->thread == thread && (!context || s->context == context)) return s;
    return NULL;
}
/* A stream object that is no longer in use, or a new one; it is held. Call it between gm_relax and gm_unrelax. */
static struct gm_stream *unused(CUcontext context) {
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next) {
        if (atomic_load(&s->state) == GM_LIVE || !hold(s)) continue;
        int state = atomic_load(&s->state);
        if (state == GM_DESTROYED && s->context == context) collect(s);
        if (state == GM_UNUSED || (state == GM_DESTROYED && s->context == context && s->first == s->next_marker)) return s;
        let_go(s);
    }
    struct gm_stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    hold(s);
    pthread_mutex_lock(&lock);
    s->next = atomic_load(&streams);
    atomic_store(&streams, s);
    pthread_mutex_unlock(&lock);
    return s;
}
static struct gm_stream *make(CUstream handle, CUcontext context, uint32_t thread) {
    CUcontext popped;
    CUdevice device = -1;
    int mode = gm_relax();
    struct gm_stream *s = unused(context);
    if (!s) {
        gm_unrelax(mode);
        return NULL;
    }
    bool pushed = cuda.push(context) == CUDA_SUCCESS, good = pushed && cuda.get_device(&device) == CUDA_SUCCESS;
    struct gm_gate *gate = good ? gm_gate_of(gm_gpu_of_device(device)) : NULL;
    int events = 0;
    while (atomic_load(&s->state) == GM_UNUSED && gate && good && events < GM_RING)
        if (cuda.event_create(&s->event[events], 0) == CUDA_SUCCESS) events++;
        else good = false;
    while (!good && events) cuda.event_destroy(s->event[--events]);
    if (pushed) cuda.pop(&popped);
    gm_unrelax(mode);
    s->handle = handle;
    s->context = context;
    s->device = device;
    s->thread = thread;
    s->gate = gate;
    s->first = s->oldest = s->next_marker, s->depth = 2;
    atomic_store(&s->unmarked, 0);
    atomic_store(&s->spacing, 4);
    atomic_store(&s->state, good ? GM_LIVE : GM_UNUSED);
    let_go(s);
    return good ? s : NULL;
}

/* Marks a live stream as destroyed: its handle is no longer valid, but its markers are followed. Call it with the stream held. */
static void ends(struct gm_stream *s) {
    int live = GM_LIVE;
    atomic_compare_exchange_strong(&s->state, &live, s->gate ? GM_DESTROYED : GM_UNUSED);
}
static pthread_key_t end_of_thread;
static bool sees_ends; /* whether the ends of threads are noticed; otherwise their streams are kept */
static void thread_ends(void *unused) {
    (void)unused;
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next) {
        if (s->thread != this_thread || !hold_soon(s)) continue;
        ends(s);
        let_go(s);
    }
    this_thread = 0;
}
static void make_key(void) { sees_ends = !pthread_key_create(&end_of_thread, thread_ends); }
static uint32_t own_number(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (this_thread) return this_thread;
    pthread_once(&once, make_key);
    this_thread = atomic_fetch_add(&threads, 1) + 1;
    if (sees_ends) pthread_setspecific(end_of_thread, &this_thread);
    return this_thread;
}
struct gm_stream *gm_stream_of(CUstream handle, bool per_thread) {
    if (!load_functions()) return NULL;
    if (!handle) handle = per_thread ? PER_THREAD : LEGACY;
    bool special = handle == LEGACY || handle == PER_THREAD;
    CUcontext context = NULL;
    if (special && (cuda.get_current(&context) != CUDA_SUCCESS || !context)) return NULL;
    uint32_t thread = handle == PER_THREAD ? own_number() : 0;
    struct gm_stream *s = last_used;
    if (s && s->handle == handle && s->thread == thread && (!special || s->context == context) && atomic_load(&s->state) == GM_LIVE) return s;
    s = find(handle, context, thread);
    if (!s) {
        if (!special && cuda.stream_context(handle, &context) != CUDA_SUCCESS) return NULL;
        s = make(handle, context, thread);
    }
    last_used = s;
    return s;
}

/* -- captures and destructions ---------------------------------------------------------------------------------------------------- */
static struct gm_stream *known(CUstream handle, bool per_thread) {
    CUcontext context = NULL;
    if (!atomic_load(&streams) || !load_functions()) return NULL;
    if (!handle) handle = per_thread ? PER_THREAD : LEGACY;
    if ((uintptr_t)handle <= 2 && cuda.get_current(&context) != CUDA_SUCCESS) return NULL;
    return find(handle, context, handle == PER_THREAD ? this_thread : 0);
}
/* Records the last marker before a capture begins or a stream is destroyed; afterwards none can be recorded. */
static void finish(CUstream handle, bool per_thread, bool destroyed) {
    struct gm_stream *s = known(handle, per_thread);
    if (!s || !hold_soon(s)) return;
    if (s->gate && atomic_load(&s->state) == GM_LIVE && atomic_load(&s->unmarked)) record(s, GM_RING);
    if (destroyed) ends(s);
    let_go(s);
}
void gm_capture_begins(CUstream handle, bool per_thread) {
    atomic_fetch_add(&captures, 1);
    finish(handle, per_thread, false);
}
void gm_capture_ended(void) {
    if (atomic_fetch_sub(&captures, 1) < 1) atomic_fetch_add(&captures, 1);
}
void gm_stream_destroyed(CUstream handle) {
    if (!gm_stream_captures(handle, false)) finish(handle, false, true);
}
static void forget(struct gm_stream *s) {
    bool held = hold_soon(s);
    atomic_store(&s->state, GM_UNUSED);
    if (held) let_go(s);
}
void gm_streams_forget_context(CUcontext context) {
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next)
        if (s->context == context) forget(s);
}
void gm_streams_forget_device(CUdevice device) {
    for (struct gm_stream *s = atomic_load(&streams); s; s = s->next)
        if (s->device == device) forget(s);
}
void gm_streams_after_fork(void) {
    pthread_mutex_init(&lock, NULL);
    atomic_store(&streams, NULL);
    atomic_store(&captures, 0);
    last_used = NULL;
}
