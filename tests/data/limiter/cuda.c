/* A libcuda.so.1 over the fake GPUs of gpu.h: memory of every kind, contexts, streams, events, graphs, stream capture, kernels that take
 * time, checkpoints. Compile it with the options FAKE_CUDA of harness.py. A kernel's name says how long it runs: `work_210000` takes 210,000 ns, `meet_3_2_50000` meets one other under the number 3.
 * Written from NVIDIA's documentation and from what an H200 with driver 580 did; it has the entry points that the tests use. */
#include "gpu.h"
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
typedef int R;
typedef int D;
typedef uint64_t P;
typedef void *V;
enum {
    OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 101, BAD_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500,
    OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, NOT_SUPPORTED = 801
};
/* A function that a locked process may call. */
#define FREE __attribute__((no_instrument_function))
struct entry { const char *name; V function; };
/* Defines an exported function and lists it for cuGetProcAddress. */
#define API(name, arguments) \
    EXPORT R name arguments; \
    static const struct entry entry_##name __attribute__((section("api"), used)) = {#name, (V)name}; \
    EXPORT R name arguments
/* Also its form for per-thread default streams; `call` has the parameters' names with S for `stream`. */
#define API_PTSZ(name, parameters, call) \
    static R do_##name parameters; \
    API(name, parameters) { struct stream *S = stream_of(stream, 0); return do_##name call; } \
    API(name##_ptsz, parameters) { struct stream *S = stream_of(stream, 1); return do_##name call; } \
    static R do_##name parameters
extern const struct entry __start_api[], __stop_api[];

struct ctx { int slot, device, primary, references, number; struct stream *legacy; };
struct graph { int64_t ns; int kernels; uint64_t bytes[GPUS]; uint32_t meeting, parties; };
struct stream { struct ctx *ctx; struct graph *capture; int mode, invalid, owner, destroyed; uint64_t last; struct stream *origin; };
struct event { struct ctx *ctx; uint64_t at; int recorded, number; int64_t end_ns; struct stream *capture; };
enum { PLAIN, MANAGED, ARRAY, MIPMAPPED, HANDLE, POOLED, HOST, RANGE, IMPORTED };
/* Requests of up to 1 MiB share blocks of 2 MiB; a block is freed with the last of them, and no hole in it is used again. */
struct block { P at; uint64_t used; int live, kind; struct ctx *ctx; struct block *next; };
struct memory { P at; uint64_t bytes; int kind, device, references, mappings; struct ctx *ctx; struct block *block; struct pool *pool; struct memory *of, *next; unsigned char value; /* of its last memset */ };
struct pool { uint64_t reserved, used, high, threshold; int device, host, destroyed; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started, captures_global, contexts, events, record_failures, exchange_ns;
static __thread struct ctx *stack[16];
static __thread int depth, capture_mode, captures_own;
static __thread struct stream *per_thread;
static struct ctx primary[GPUS];
static struct pool default_pool[GPUS], *current_pool[GPUS];
static struct { uint64_t reserved, used, high; } graph_memory[GPUS];
static struct memory *memories;
static struct block *blocks;
static P freed_block; /* used again for the next block, as the address of a destroyed context is for the next context */
static struct ctx *freed_context;
static P next_at = 0x7f0000000000ULL;
static struct stream *capturing[64];
static void spend(int64_t ns) {
    int64_t until = gpu_now() + ns;
    if (model_wait_until || ns > 20000) gpu_wait_until(until);
    else while (gpu_now() < until) {} /* a sleep lasts 50 us longer */
}
/* Each call of the driver begins and ends here (-finstrument-functions): that of a locked process waits until it is unlocked. */
static struct process *own;
static int own_pid;
static __thread int nested, counted;
static __thread int64_t calls; /* by this thread */
FREE static void forget_own(void) { own = NULL; }
FREE void __cyg_profile_func_enter(V function, V caller);
FREE void __cyg_profile_func_exit(V function, V caller);
FREE void __cyg_profile_func_enter(V function, V caller) {
    (void)function, (void)caller;
    struct process *p = own;
    calls += !nested;
    if (nested++ || !p || p->pid != own_pid) return;
    for (counted = 1; __atomic_add_fetch(&p->calls, 1, __ATOMIC_SEQ_CST), __atomic_load_n(&p->next, __ATOMIC_SEQ_CST) || gpu_state(p);) {
        __atomic_sub_fetch(&p->calls, 1, __ATOMIC_SEQ_CST);
        gpu_wait_until(gpu_now() + 1000000);
    }
}
FREE void __cyg_profile_func_exit(V function, V caller) {
    (void)function, (void)caller;
    if (--nested || !counted) return;
    counted = 0;
    __atomic_sub_fetch(&own->calls, 1, __ATOMIC_SEQ_CST);
}
static struct ctx *current(void) { return depth ? stack[depth - 1] : NULL; }
static int visible[GPUS], devices;

/* A call that must not be made while a stream is captured, unless the thread's mode allows it. */
static R unsafe(void) {
    if (capture_mode == 2 || (!captures_own && (capture_mode == 1 || !captures_global))) return OK;
    for (int i = 0; i < 64; i++)
        if (capturing[i] && capturing[i]->mode != 2) capturing[i]->invalid = 1;
    return CAPTURE_UNSUPPORTED;
}
#define UNSAFE() do { R unsafe_ = unsafe(); if (unsafe_) return unsafe_; } while (0)

FREE API(cuInit, (unsigned flags)) {
    if (flags) return INVALID;
    if (!gpu_open()) return NO_DEVICE;
    pthread_mutex_lock(&lock);
    if (!started) {
        const char *list = getenv("CUDA_VISIBLE_DEVICES");
        for (int i = 0; i < model->gpus; i++) visible[i] = i;
        devices = model->gpus;
        if (list) {
            char copy[512], *rest = copy;
            snprintf(copy, sizeof copy, "%s", list);
            devices = 0;
            for (char *word; (word = strsep(&rest, ",")) && devices < GPUS;)
                for (int i = 0; i < model->gpus; i++)
                    if (!strncmp(word, "GPU-", 4) ? !strncmp(model->gpu[i].uuid, word, strlen(word)) : *word && atoi(word) == i)
                        visible[devices++] = i;
        }
        started = 1;
        pthread_atfork(NULL, NULL, forget_own);
    }
    pthread_mutex_unlock(&lock);
    return devices ? OK : NO_DEVICE;
}
FREE API(cuDriverGetVersion, (int *version)) { *version = 13000; return OK; }
API(cuDeviceGetCount, (int *n)) { *n = devices; return started ? OK : NOT_INITIALIZED; }
API(cuDeviceGet, (D *d, int i)) {
    if (!started) return NOT_INITIALIZED;
    if (i < 0 || i >= devices) return NO_DEVICE;
    *d = i;
    return OK;
}
static struct gpu *gpu(D d) { return started && d >= 0 && d < devices ? &model->gpu[visible[d]] : NULL; }
API(cuDeviceGetName, (char *name, int n, D d)) { snprintf(name, (size_t)n, "Fake GPU %d", d); return OK; }
API(cuDeviceGetAttribute, (int *value, int attribute, D d)) {
    (void)d;
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 1;
    return OK;
}
static R uuid(unsigned char *u, D d) {
    if (!gpu(d)) return NO_DEVICE;
    const char *text = gpu(d)->uuid + 4;
    for (int n = 0; n < 16 && *text; text++) {
        unsigned byte;
        if (*text == '-') continue;
        sscanf(text++, "%2x", &byte);
        u[n++] = (unsigned char)byte;
    }
    return OK;
}
API(cuDeviceGetUuid, (unsigned char *u, D d)) { return uuid(u, d); }
API(cuDeviceGetUuid_v2, (unsigned char *u, D d)) { return uuid(u, d); }
API(cuDeviceTotalMem_v2, (size_t *n, D d)) {
    if (!gpu(d)) return NO_DEVICE;
    if (!n) return INVALID;
    *n = gpu(d)->total_bytes - gpu(d)->reserved_bytes;
    return OK;
}
API(cuDeviceTotalMem, (unsigned *n, D d)) { (void)d; *n = 0xffffffffu; return OK; }

/* Takes or returns bytes of a GPU for this process; `where` selects the counter. */
enum { DATA, CONTEXT, MODULE };
static uint64_t *counter(struct process *p, int where, D d) {
    return where == DATA ? &p->bytes[visible[d]] : where == CONTEXT ? &p->context_bytes[visible[d]] : &p->module_bytes[visible[d]];
}
static R take(D d, uint64_t bytes, int where) {
    gpu_lock();
    if (gpu_free_bytes(visible[d]) < bytes) gpu_reap();
    struct process *p = gpu_free_bytes(visible[d]) < bytes ? NULL : gpu_process(getpid(), 1);
    if (p) *counter(p, where, d) += bytes, own_pid = p->pid, own = p;
    gpu_unlock();
    return p ? OK : NO_MEMORY;
}
static void give(D d, uint64_t bytes, int where) {
    gpu_lock();
    struct process *p = gpu_process(getpid(), 0);
    if (p) *counter(p, where, d) -= bytes;
    gpu_unlock();
}

/* Contexts */
static struct stream *new_stream(struct ctx *c) {
    struct stream *s = calloc(1, sizeof *s);
    s->ctx = c;
    return s;
}
static R open_context(struct ctx *c, D d) {
    R r = take(d, CONTEXT_BYTES, CONTEXT);
    if (r) return r;
    gpu_lock();
    gpu_reap();
    gpu_advance();
    int slot = 0;
    while (slot < CONTEXTS && model->context[slot].pid) slot++;
    if (slot < CONTEXTS) {
        struct context *x = &model->context[slot];
        memset(x, 0, offsetof(struct context, ring));
        x->pid = getpid(), x->device = visible[d];
    }
    gpu_unlock();
    if (slot == CONTEXTS) {
        give(d, CONTEXT_BYTES, CONTEXT);
        return NO_MEMORY;
    }
    *c = (struct ctx){.slot = slot, .device = d, .references = 1, .number = ++contexts};
    c->legacy = new_stream(c);
    return OK;
}
static void free_data(struct memory *m);
static void free_reached(void);
static void unmap_parts(P array);
static void close_context(struct ctx *c) {
    for (struct memory *m = memories; m; m = m->next)
        if (m->ctx == c && (m->kind == ARRAY || m->kind == MIPMAPPED)) unmap_parts(m->at);
    gpu_lock();
    gpu_advance();
    model->context[c->slot].pid = 0;
    gpu_unlock();
    give(c->device, CONTEXT_BYTES, CONTEXT);
    pthread_mutex_lock(&lock);
    for (struct memory **m = &memories; *m;) {
        struct memory *x = *m;
        if (x->ctx != c || x->kind == HANDLE || x->kind == RANGE || x->kind == POOLED || x->kind == IMPORTED) {
            m = &x->next;
            continue;
        }
        *m = x->next;
        if (x->kind != HOST) free_data(x);
        free(x);
    }
    pthread_mutex_unlock(&lock);
    c->references = 0;
    free_reached();
}
API(cuDevicePrimaryCtxRetain, (V *c, D d)) {
    if (!c) return INVALID;
    if (!gpu(d)) return started ? NO_DEVICE : NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    R r = OK;
    if (primary[d].references++ == 0 && (r = open_context(&primary[d], d))) primary[d].references = 0;
    primary[d].primary = 1;
    pthread_mutex_unlock(&lock);
    *c = &primary[d];
    return r;
}
static R release_primary(D d) {
    if (!gpu(d)) return NO_DEVICE;
    pthread_mutex_lock(&lock);
    int last = primary[d].references == 1, none = primary[d].references == 0;
    if (!last && !none) primary[d].references--;
    pthread_mutex_unlock(&lock);
    if (last) close_context(&primary[d]);
    return none ? BAD_CONTEXT : OK;
}
API(cuDevicePrimaryCtxRelease_v2, (D d)) { return release_primary(d); }
API(cuDevicePrimaryCtxRelease, (D d)) { return release_primary(d); }
/* The context's memory is freed; it is made again when it is used. */
static R reset_primary(D d) {
    if (!gpu(d)) return NO_DEVICE;
    if (primary[d].references) close_context(&primary[d]);
    return OK;
}
API(cuDevicePrimaryCtxReset_v2, (D d)) { return reset_primary(d); }
API(cuDevicePrimaryCtxReset, (D d)) { return reset_primary(d); }
API(cuDevicePrimaryCtxGetState, (D d, unsigned *flags, int *active)) { *flags = 0; *active = primary[d].references > 0; return OK; }
static R create_context(V *c, D d) {
    if (!c) return INVALID;
    if (!gpu(d)) return started ? NO_DEVICE : NOT_INITIALIZED;
    struct ctx *x = freed_context ? freed_context : malloc(sizeof *x);
    freed_context = NULL;
    R r = open_context(x, d);
    if (r) free(x);
    else *c = stack[depth++] = x;
    return r;
}
API(cuCtxCreate_v2, (V *c, unsigned flags, D d)) { (void)flags; return create_context(c, d); }
API(cuCtxCreate_v3, (V *c, V affinity, int n, unsigned flags, D d)) { (void)affinity, (void)n, (void)flags; return create_context(c, d); }
API(cuCtxCreate_v4, (V *c, V parameters, unsigned flags, D d)) { (void)parameters, (void)flags; return create_context(c, d); }
API(cuCtxDestroy_v2, (V c)) {
    struct ctx *x = c;
    if (!x || !x->references) return BAD_CONTEXT;
    if (current() == x) depth--;
    close_context(x);
    freed_context = x;
    return OK;
}
/* A green context holds the primary one and needs no memory of its own. */
API(cuGreenCtxCreate, (V *green, V parts, D d, unsigned flags)) {
    V held;
    R r = cuDevicePrimaryCtxRetain(&held, d);
    if (r) return r;
    (void)parts, (void)flags;
    struct ctx *x = malloc(sizeof *x);
    *x = (struct ctx){.slot = primary[d].slot, .device = d, .references = 1};
    x->legacy = new_stream(x);
    *green = x;
    return OK;
}
API(cuCtxFromGreenCtx, (V *c, V green)) { *c = green; return OK; }
API(cuGreenCtxDestroy, (V green)) {
    struct ctx *x = green;
    x->references = 0;
    return release_primary(x->device);
}
API(cuCtxGetCurrent, (V *c)) { *c = current(); return started ? OK : NOT_INITIALIZED; }
API(cuCtxSetCurrent, (V c)) {
    if (depth) depth--;
    if (c) stack[depth++] = c;
    return OK;
}
API(cuCtxPushCurrent_v2, (V c)) { stack[depth++] = c; return OK; }
API(cuCtxPopCurrent_v2, (V *c)) {
    if (!depth) return BAD_CONTEXT;
    if (c) *c = current();
    depth--;
    return OK;
}
API(cuCtxGetDevice, (D *d)) {
    if (!current()) return BAD_CONTEXT;
    *d = current()->device;
    return OK;
}

/* Streams, events, kernels */
/* A stale handle would be used, which a driver does not survive. */
static struct stream *used(struct stream *s) {
    if (!s->destroyed && s->ctx->references) return s;
    fprintf(stderr, "libcuda: a stream is used after its end\n");
    abort();
}
static struct stream *stream_of(V given, int per_thread_default) {
    uintptr_t n = (uintptr_t)given;
    if (n > 2) return used(given);
    struct ctx *c = current();
    if (!c || !c->references) return NULL;
    if (n == 1 || (n == 0 && !per_thread_default)) return c->legacy;
    if (!per_thread || per_thread->ctx != c) per_thread = new_stream(c);
    return per_thread;
}
static struct context *timeline(struct stream *s) { return &model->context[s->ctx->slot]; }
static R submit(struct stream *s, int64_t ns, uint32_t meeting, uint32_t parties) {
    if (!s) return BAD_CONTEXT;
    if (s->capture) {
        s->capture->ns += ns, s->capture->kernels++, s->capture->meeting = meeting, s->capture->parties = parties;
        return s->invalid ? CAPTURE_INVALIDATED : OK;
    }
    for (;;) {
        gpu_lock();
        gpu_advance();
        struct context *c = timeline(s);
        if (c->submitted - c->done < QUEUE) {
            c->ring[c->submitted++ % RING] = (struct work){.left_ns = ns, .meeting = meeting, .parties = parties};
            s->last = c->submitted;
            struct process *p = gpu_process(getpid(), 1);
            if (p && ns) p->launches++;
            gpu_unlock();
            return OK;
        }
        gpu_unlock();
        spend(100000); /* the queue is full */
    }
}
/* Waits until the context has done `at` pieces of work. */
static R wait_for(struct ctx *x, uint64_t at) {
    for (;;) {
        gpu_lock();
        gpu_advance();
        struct context *c = &model->context[x->slot];
        int64_t left = 0, until = gpu_now();
        for (uint64_t i = c->done; i < at; i++) left += c->ring[i % RING].left_ns;
        int done = c->done >= at;
        gpu_unlock();
        if (done) return OK;
        gpu_wait_until(until + (left > 1000 ? left : 1000));
    }
}
static int done(struct ctx *x, uint64_t at) {
    gpu_lock();
    gpu_advance();
    int r = model->context[x->slot].done >= at;
    gpu_unlock();
    return r;
}
static uint64_t whole(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }
#define STEP (32 * MIB) /* by which pools grow and shrink */
static void trim(struct pool *p, uint64_t keep) {
    uint64_t want = whole(p->used > keep ? p->used : keep, STEP);
    if (p->reserved <= want) return;
    give(p->device, p->reserved - want, DATA);
    p->reserved = want;
}
static void trim_default_pools(void) {
    free_reached();
    pthread_mutex_lock(&lock);
    for (int d = 0; d < devices; d++) trim(&default_pool[d], default_pool[d].threshold);
    pthread_mutex_unlock(&lock);
}
API(cuCtxSynchronize, (void)) {
    UNSAFE();
    struct ctx *c = current();
    if (!c || !c->references) return BAD_CONTEXT;
    R r = wait_for(c, model->context[c->slot].submitted);
    trim_default_pools();
    return r;
}
API(cuStreamCreate, (V *s, unsigned flags)) {
    (void)flags;
    if (!current()) return BAD_CONTEXT;
    *s = new_stream(current());
    return OK;
}
API(cuGreenCtxStreamCreate, (V *s, V green, unsigned flags, int priority)) { (void)flags, (void)priority; *s = new_stream(green); return OK; }
API(cuStreamCreateWithPriority, (V *s, unsigned flags, int priority)) { (void)priority; return cuStreamCreate(s, flags); }
API(cuStreamDestroy_v2, (V s)) { used(s)->destroyed = 1; return OK; }
API_PTSZ(cuStreamSynchronize, (V stream), (S)) {
    struct stream *s = stream;
    if (!s) return BAD_CONTEXT;
    if (s->capture) { s->invalid = 1; return CAPTURE_UNSUPPORTED; }
    UNSAFE();
    R r = wait_for(s->ctx, s->last);
    trim_default_pools();
    return r;
}
API_PTSZ(cuStreamQuery, (V stream), (S)) {
    struct stream *s = stream;
    if (!s) return BAD_CONTEXT;
    UNSAFE();
    spend(500);
    return done(s->ctx, s->last) ? OK : NOT_READY;
}
API_PTSZ(cuStreamGetCtx, (V stream, V *c), (S, c)) {
    struct stream *s = stream;
    if (!s) return BAD_CONTEXT;
    *c = s->ctx;
    return OK;
}
API(cuStreamGetDevice, (V stream, D *d)) { struct stream *s = stream_of(stream, 0); if (!s) return BAD_CONTEXT; *d = s->ctx->device; return OK; }
API(cuEventCreate, (V *e, unsigned flags)) {
    (void)flags;
    if (!current()) return BAD_CONTEXT;
    struct event *x = calloc(1, sizeof *x);
    x->ctx = current(), x->number = x->ctx->number, events++;
    *e = x;
    return OK;
}
API(cuEventDestroy_v2, (V e)) { free(e); events--; return OK; }
/* How many events there are; the next `failures` records of one fail, as in a broken context. */
API(cuFakeEvents, (unsigned failures)) { record_failures = failures; return events; }
API_PTSZ(cuEventRecord, (V e, V stream), (e, S)) {
    struct event *x = e;
    struct stream *s = stream;
    if (!s) return BAD_CONTEXT;
    if (x->ctx != s->ctx || record_failures) {
        record_failures -= record_failures > 0;
        return BAD_HANDLE;
    }
    x->capture = s->capture ? s : NULL;
    if (s->capture) return OK;
    pthread_testcancel(); /* a driver may wait here for room in its queue */
    R r = submit(s, 0, 0, 0);
    x->at = s->last, x->recorded = 1, x->end_ns = 0;
    return r;
}
static R query(struct event *x) {
    if (!x->ctx->references || x->number != x->ctx->number) {
        fprintf(stderr, "libcuda: an event is used after its context\n");
        abort();
    }
    if (!x->recorded || x->end_ns) return OK;
    if (!done(x->ctx, x->at)) return NOT_READY;
    x->end_ns = model->context[x->ctx->slot].ring[(x->at - 1) % RING].end_ns;
    return OK;
}
API(cuEventQuery, (V e)) {
    UNSAFE();
    spend(500);
    R r = query(e);
    free_reached();
    return r;
}
API(cuEventSynchronize, (V e)) {
    UNSAFE();
    struct event *x = e;
    if (x->recorded) wait_for(x->ctx, x->at);
    return query(x);
}
static R elapsed(float *ms, struct event *a, struct event *b) {
    if (!a->recorded || !b->recorded) return BAD_HANDLE;
    if (query(a) || query(b)) return NOT_READY;
    *ms = (float)(b->end_ns - a->end_ns) / 1e6f;
    return OK;
}
API(cuEventElapsedTime, (float *ms, V a, V b)) { return elapsed(ms, a, b); }
API(cuEventElapsedTime_v2, (float *ms, V a, V b)) { return elapsed(ms, a, b); }
API_PTSZ(cuStreamWaitEvent, (V stream, V event, unsigned flags), (S, event, flags)) {
    struct stream *s = stream;
    struct event *e = event;
    (void)flags;
    if (!s) return BAD_CONTEXT;
    if (e->capture && e->capture->capture && !s->capture)
        s->capture = e->capture->capture, s->origin = e->capture, s->mode = e->capture->mode;
    return OK; /* the work of a context runs in order */
}

struct function { int64_t ns; uint32_t meeting, parties; };
API(cuModuleLoadData, (V *m, const void *image)) {
    (void)image;
    UNSAFE();
    if (!current()) return BAD_CONTEXT;
    R r = take(current()->device, MODULE_BYTES, MODULE);
    *m = r ? NULL : (V)(uintptr_t)(current()->device + 1);
    return r;
}
API(cuModuleUnload, (V m)) { give((D)(uintptr_t)m - 1, MODULE_BYTES, MODULE); return OK; }
API(cuModuleGetFunction, (V *f, V m, const char *name)) {
    (void)m;
    struct function x = {10000, 0, 0};
    long long ns;
    if (sscanf(name, "work_%lld", &ns) == 1) x.ns = ns;
    else if (sscanf(name, "meet_%u_%u_%lld", &x.meeting, &x.parties, &ns) == 3) x.ns = ns;
    else if (strcmp(name, "work")) return NOT_FOUND;
    *f = memcpy(malloc(sizeof x), &x, sizeof x);
    return OK;
}
#define LAUNCH_NS 3000 /* what the CPU needs for a launch */
static __thread int64_t launch_ns; /* of this thread's last one */
static R launch(struct function *f, struct stream *s) {
    if (!f) return INVALID;
    int64_t begun = gpu_now();
    spend(LAUNCH_NS);
    R r = submit(s, f->ns, f->meeting, f->parties);
    launch_ns = gpu_now() - begun;
    return r;
}
FREE API(cuFakeCalls, (int64_t *n)) { *n = calls; return OK; }
FREE API(cuFakeLaunchNs, (int64_t *ns)) { *ns = launch_ns; return OK; }
typedef unsigned U;
#define LAUNCH(name, per_thread) \
    API(name, (V f, U gx, U gy, U gz, U bx, U by, U bz, U shared, V stream, V *parameters, V *extra)) { \
        (void)bx, (void)by, (void)bz, (void)shared, (void)parameters, (void)extra; \
        return gx && gy && gz ? launch(f, stream_of(stream, per_thread)) : INVALID; }
LAUNCH(cuLaunchKernel, 0) LAUNCH(cuLaunchKernel_ptsz, 1)
#define COOPERATIVE(name, per_thread) \
    API(name, (V f, U gx, U gy, U gz, U bx, U by, U bz, U shared, V stream, V *parameters)) { \
        (void)bx, (void)by, (void)bz, (void)shared, (void)parameters; \
        return gx && gy && gz ? launch(f, stream_of(stream, per_thread)) : INVALID; }
COOPERATIVE(cuLaunchCooperativeKernel, 0) COOPERATIVE(cuLaunchCooperativeKernel_ptsz, 1)
struct launch_config { U grid[3], block[3], shared; V stream; V attributes; U n; };
/* Attributes must come through untouched: the last one's first word is kept for cuFakeLastAttribute. */
static U last_attribute;
#define LAUNCH_EX(name, per_thread) \
    API(name, (const struct launch_config *c, V f, V *parameters, V *extra)) { \
        (void)parameters, (void)extra; \
        if (!c) return INVALID; \
        if (c->n) last_attribute = *(U *)c->attributes; \
        return launch(f, stream_of(c->stream, per_thread)); }
LAUNCH_EX(cuLaunchKernelEx, 0) LAUNCH_EX(cuLaunchKernelEx_ptsz, 1)
API(cuFakeLastAttribute, (U *value)) { *value = last_attribute; return OK; }
struct cooperative { V f; U grid[3], block[3], shared; V stream; V *parameters; };
API(cuLaunchCooperativeKernelMultiDevice, (struct cooperative *list, U n, U flags)) {
    (void)flags;
    R r = OK;
    for (U i = 0; i < n && !r; i++) r = launch(list[i].f, stream_of(list[i].stream, 0));
    return r;
}

/* Copies and memsets inside the device; a copy from or to the host takes a copy engine and no time of the model. */
#define COPY_BYTES_PER_US 2200000ULL
#define SET_BYTES_PER_US 4000000ULL
static R move(struct stream *s, uint64_t bytes, uint64_t bytes_per_us) {
    spend(LAUNCH_NS);
    return submit(s, (int64_t)(bytes * 1000 / bytes_per_us) + 1000, 0, 0);
}
API_PTSZ(cuMemcpyDtoDAsync_v2, (P to, P from, size_t n, V stream), (to, from, n, S)) { (void)to, (void)from; return move(stream, n, COPY_BYTES_PER_US); }
API(cuMemcpyDtoD_v2, (P to, P from, size_t n)) { (void)to, (void)from; return move(stream_of(NULL, 0), n, COPY_BYTES_PER_US); }
API(cuMemcpyDtoD_v2_ptds, (P to, P from, size_t n)) { (void)to, (void)from; return move(stream_of(NULL, 1), n, COPY_BYTES_PER_US); }
static int is_host(P at) { return at < 0x7f0000000000ULL; }
API(cuPointerGetAttribute, (V out, int attribute, P at)) {
    if (attribute != 2 || is_host(at)) return INVALID; /* memory that the driver does not know */
    *(U *)out = 2;
    return OK;
}
API_PTSZ(cuMemcpyAsync, (P to, P from, size_t n, V stream), (to, from, n, S)) { return is_host(to) || is_host(from) ? OK : move(stream, n, COPY_BYTES_PER_US); }
API_PTSZ(cuMemcpyPeerAsync, (P to, V c, P from, V d, size_t n, V stream), (to, c, from, d, n, S)) { (void)to, (void)c, (void)from, (void)d; return move(stream, n, COPY_BYTES_PER_US); }
struct place2 { size_t x, y; int type; V host; P device; V array; size_t pitch; };
struct place3 { size_t x, y, z, level; int type; V host; P device; V array, unused; size_t pitch, height; };
struct copy2 { struct place2 from, to; size_t width, height; };
struct copy3 { struct place3 from, to; size_t width, height, depth; };
API_PTSZ(cuMemcpy2DAsync_v2, (const struct copy2 *c, V stream), (c, S)) { return move(stream, c->width * c->height, COPY_BYTES_PER_US); }
API_PTSZ(cuMemcpy3DAsync_v2, (const struct copy3 *c, V stream), (c, S)) { return move(stream, c->width * c->height * c->depth, COPY_BYTES_PER_US); }
API(cuMemcpyDtoA_v2, (V to, size_t at, P from, size_t n)) { (void)to, (void)at, (void)from; return move(stream_of(NULL, 0), n, COPY_BYTES_PER_US); }
API(cuMemcpyAtoD_v2, (P to, V from, size_t at, size_t n)) { (void)to, (void)at, (void)from; return move(stream_of(NULL, 0), n, COPY_BYTES_PER_US); }
API(cuMemcpyAtoA_v2, (V to, size_t to_at, V from, size_t at, size_t n)) { (void)to, (void)to_at, (void)from, (void)at; return move(stream_of(NULL, 0), n, COPY_BYTES_PER_US); }
API_PTSZ(cuMemcpy3DPeerAsync, (const struct copy3 *c, V stream), (c, S)) { return move(stream, c->width * c->height * c->depth, COPY_BYTES_PER_US); }
static R batch(struct stream *s, P *to, P *from, size_t *sizes, size_t n) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += is_host(to[i]) || is_host(from[i]) ? 0 : sizes[i];
    return move(s, bytes, COPY_BYTES_PER_US);
}
#define LISTS P *to, P *from, size_t *sizes, size_t n, V attributes, size_t *which, size_t kinds
API_PTSZ(cuMemcpyBatchAsync, (LISTS, size_t *failed, V stream), (to, from, sizes, n, attributes, which, kinds, failed, S)) { (void)attributes, (void)which, (void)kinds; *failed = n; return batch(stream, to, from, sizes, n); }
API_PTSZ(cuMemcpyBatchAsync_v2, (LISTS, V stream), (to, from, sizes, n, attributes, which, kinds, S)) { (void)attributes, (void)which, (void)kinds; return batch(stream, to, from, sizes, n); }
struct batched { struct { int type; P device; size_t rest[3]; } from, to; size_t width, height, depth; int order, flags; };
static R batch3(struct stream *s, const struct batched *list, size_t n) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += list[i].width * list[i].height * list[i].depth * (list[i].from.type == 2 ? 4 : 1);
    return move(s, bytes, COPY_BYTES_PER_US);
}
API_PTSZ(cuMemcpy3DBatchAsync, (size_t n, struct batched *list, size_t *failed, uint64_t flags, V stream), (n, list, failed, flags, S)) { (void)flags; *failed = n; return batch3(stream, list, n); }
API_PTSZ(cuMemcpy3DBatchAsync_v2, (size_t n, struct batched *list, uint64_t flags, V stream), (n, list, flags, S)) { (void)flags; return batch3(stream, list, n); }
API_PTSZ(cuMemcpyWithAttributesAsync, (P to, P from, size_t n, V attributes, V stream), (to, from, n, attributes, S)) { (void)attributes; return is_host(to) || is_host(from) ? OK : move(stream, n, COPY_BYTES_PER_US); }
API_PTSZ(cuMemcpy3DWithAttributesAsync, (struct batched *c, uint64_t flags, V stream), (c, flags, S)) { (void)flags; return batch3(stream, c, 1); }
struct fabric { P from[3], to[3]; size_t bytes; U flags; };
API_PTSZ(cuFabricCpyBatchAsync, (size_t n, struct fabric *list, uint64_t flags, V stream), (n, list, flags, S)) { (void)flags; return n == 1 ? move(stream, list->bytes, COPY_BYTES_PER_US) : INVALID; }
API_PTSZ(cuMemBatchDecompressAsync, (V list, size_t n, U flags, size_t *failed, V stream), (list, n, flags, failed, S)) { (void)list, (void)flags, (void)failed; return move(stream, n * 440000000, COPY_BYTES_PER_US); }
API_PTSZ(cuMemsetD16Async, (P at, unsigned short value, size_t n, V stream), (at, value, n, S)) { (void)at, (void)value; return move(stream, n * 2, SET_BYTES_PER_US); }
API_PTSZ(cuMemsetD2D8Async, (P at, size_t pitch, unsigned char value, size_t width, size_t rows, V stream), (at, pitch, value, width, rows, S)) { (void)at, (void)pitch, (void)value; return move(stream, width * rows, SET_BYTES_PER_US); }
API_PTSZ(cuMemsetD2D32Async, (P at, size_t pitch, unsigned value, size_t width, size_t rows, V stream), (at, pitch, value, width, rows, S)) { (void)at, (void)pitch, (void)value; return move(stream, width * rows * 4, SET_BYTES_PER_US); }
API(cuLaunchGridAsync, (V f, int x, int y, V stream)) { return x && y ? launch(f, stream_of(stream, 0)) : INVALID; }
API(cuMemcpyHtoD_v2, (P to, const void *from, size_t n)) { UNSAFE(); (void)to, (void)from, (void)n; return OK; }
API_PTSZ(cuMemsetD8Async, (P at, unsigned char value, size_t n, V stream), (at, value, n, S)) { (void)at, (void)value; return move(stream, n, SET_BYTES_PER_US); }
API_PTSZ(cuMemsetD32Async, (P at, unsigned value, size_t n, V stream), (at, value, n, S)) { (void)at, (void)value; return move(stream, n * 4, SET_BYTES_PER_US); }
/* The byte that the last memset of this memory wrote; `set`: writes it. */
static unsigned char byte_at(P at, int set, unsigned char value) {
    pthread_mutex_lock(&lock);
    struct memory *m = memories;
    while (m && (m->kind != PLAIN || at < m->at || at >= m->at + m->bytes)) m = m->next;
    if (m && set) m->value = value;
    value = m ? m->value : 0;
    pthread_mutex_unlock(&lock);
    return value;
}
API(cuMemcpyDtoH_v2, (void *to, P from, size_t n)) { UNSAFE(); memset(to, byte_at(from, 0, 0), n); return OK; }
API(cuMemsetD8_v2, (P at, unsigned char value, size_t n)) { byte_at(at, 1, value); return move(stream_of(NULL, 0), n, SET_BYTES_PER_US); }

/* Memory */
static struct memory *add(P at, uint64_t bytes, int kind, D d) {
    struct memory *m = calloc(1, sizeof *m);
    pthread_mutex_lock(&lock);
    if (!at) at = next_at, next_at += (bytes + 2 * MIB - 1) / (2 * MIB) * 2 * MIB + 2 * MIB;
    *m = (struct memory){.at = at, .bytes = bytes, .kind = kind, .device = d, .references = 1, .ctx = current(), .next = memories};
    memories = m;
    pthread_mutex_unlock(&lock);
    return m;
}
/* Removes and returns it, if it is of one of the two kinds. */
static int removed(P at, int kind, int other, struct memory *out) {
    pthread_mutex_lock(&lock);
    for (struct memory **m = &memories; *m; m = &(*m)->next) {
        struct memory *x = *m;
        if (x->at != at || (x->kind != kind && x->kind != other)) continue;
        *m = x->next, *out = *x;
        free(x);
        pthread_mutex_unlock(&lock);
        return 1;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}
static struct memory *find(P at, int kind) { /* with the lock */
    struct memory *m = memories;
    while (m && (m->at != at || m->kind != kind)) m = m->next;
    return m;
}
static R allocate_small(P *at, uint64_t bytes, int kind, struct ctx *c) {
    bytes = whole(bytes, 512);
    pthread_mutex_lock(&lock);
    struct block *b = blocks;
    while (b && (b->kind != kind || b->ctx != c || b->used + bytes > 2 * MIB)) b = b->next;
    R r = b ? OK : take(c->device, 2 * MIB, DATA);
    if (!r && !b) {
        b = malloc(sizeof *b);
        if (!freed_block) freed_block = next_at, next_at += 4 * MIB;
        *b = (struct block){.at = freed_block, .kind = kind, .ctx = c, .next = blocks};
        blocks = b, freed_block = 0;
    }
    if (!r) *at = b->at + b->used, b->used += bytes, b->live++;
    pthread_mutex_unlock(&lock);
    if (!r) add(*at, bytes, kind, c->device)->block = b;
    return r;
}
/* Frees what is behind it. Call with the lock. */
static void free_data(struct memory *m) {
    if (!m->block) give(m->device, m->bytes, DATA);
    else if (!--m->block->live) {
        struct block **b = &blocks;
        while (*b != m->block) b = &(*b)->next;
        *b = m->block->next;
        freed_block = m->block->at;
        free(m->block);
        give(m->device, 2 * MIB, DATA);
    }
}
/* What cuMemFreeAsync frees when the context has done `at` pieces of work. */
static struct later { struct memory memory; struct ctx *ctx; uint64_t at; struct later *next; } *laters;
static void free_later(struct memory m, struct stream *s) {
    struct later *l = malloc(sizeof *l);
    pthread_mutex_lock(&lock);
    *l = (struct later){m, s->ctx, s->last, laters}, laters = l;
    pthread_mutex_unlock(&lock);
}
static void free_reached(void) {
    pthread_mutex_lock(&lock);
    for (struct later **l = &laters, *x; (x = *l);) {
        if (x->ctx->references && !done(x->ctx, x->at)) {
            l = &x->next;
            continue;
        }
        *l = x->next;
        free_data(&x->memory);
        free(x);
    }
    pthread_mutex_unlock(&lock);
}
static R allocate(P *at, uint64_t bytes, int kind) {
    UNSAFE();
    free_reached();
    struct ctx *c = current();
    if (!c) return started ? BAD_CONTEXT : NOT_INITIALIZED;
    if (!at || !bytes) return INVALID;
    if (kind < ARRAY && bytes <= MIB) return allocate_small(at, bytes, kind, c);
    R r = take(c->device, bytes = whole(bytes, kind < ARRAY ? 2 * MIB : 1), DATA);
    if (!r) *at = add(0, bytes, kind, c->device)->at;
    return r;
}
static R release(P at, int kind, int other) {
    struct memory m;
    UNSAFE();
    if (!at && kind == PLAIN) return OK;
    if (!removed(at, kind, other, &m)) return INVALID;
    pthread_mutex_lock(&lock);
    free_data(&m);
    pthread_mutex_unlock(&lock);
    return OK;
}
API(cuMemAlloc_v2, (P *at, size_t n)) { return allocate(at, n, PLAIN); }
API(cuMemAlloc_v4, (P *at, size_t n)) { return allocate(at, n, PLAIN); } /* of a future CUDA */
API(cuMemAlloc, (U *at, U n)) {
    P wide = 0;
    R r = allocate(&wide, n, PLAIN);
    *at = (U)wide;
    return r;
}
API(cuMemAllocManaged, (P *at, size_t n, U flags)) { return flags == 1 || flags == 2 ? allocate(at, n, MANAGED) : INVALID; }
API(cuMemAllocPitch_v2, (P *at, size_t *pitch, size_t width, size_t height, U element)) {
    if (!pitch || (element != 4 && element != 8 && element != 16)) return INVALID;
    *pitch = (width + 511) / 512 * 512;
    return allocate(at, *pitch * height, PLAIN);
}
API(cuMemGetInfo_v2, (size_t *n, size_t *total)) {
    struct ctx *c = current();
    if (!c) return started ? BAD_CONTEXT : NOT_INITIALIZED;
    if (!n || !total) return INVALID;
    free_reached();
    gpu_lock();
    gpu_reap();
    *n = gpu_free_bytes(visible[c->device]);
    gpu_unlock();
    return cuDeviceTotalMem_v2(total, c->device);
}
API(cuMemAllocHost_v2, (V *at, size_t n)) {
    UNSAFE();
    *at = malloc(n);
    return *at ? OK : NO_MEMORY;
}
API(cuMemFreeHost, (V at)) { free(at); return OK; }

/* Arrays as on the H200: rows of 64 bytes, in tiles of 8 to 128 rows and 4 slices; blocks of 2 MiB, which arrays of up to 1 MiB share. */
struct array2 { size_t width, height; int format; U channels; };
struct array3 { size_t width, height, depth; int format; U channels, flags; };
static uint64_t array_bytes(const struct array3 *a, U levels) {
    int f = a->format;
    uint64_t element = (uint64_t)(f == 1 || f == 8 ? 1 : f == 2 || f == 9 || f == 16 ? 2 : 4) * a->channels, sum = 0;
    for (U i = 0; i < levels; i++) {
        size_t w = a->width >> i, h = a->height >> i, d = a->depth >> i;
        uint64_t tile = h > 64 ? 128 : h > 32 ? 64 : h > 16 ? 32 : h > 8 ? 16 : 8;
        if (a->flags & 5) d = a->depth; /* layers or faces */
        else if (d > 2) d = whole(d, 4);
        sum += whole((w ? w : 1) * element, 64) * whole(h ? h : 1, tile) * (d ? d : 1);
    }
    return sum > MIB ? whole(sum, 2 * MIB) : 2 * MIB / (2 * MIB / whole(sum, 65536));
}
static R create_array(P *at, const struct array3 *a, U levels, int kind) {
    if (!at || !a || !a->width || !a->channels) return INVALID;
    if (a->flags & 0xc0) { /* sparse or deferred: nothing behind it yet */
        *at = add(0, 0, kind, current()->device)->at;
        return OK;
    }
    return allocate(at, array_bytes(a, levels), kind);
}
API(cuArray3DCreate_v2, (P *at, const struct array3 *a)) { return create_array(at, a, 1, ARRAY); }
API(cuArrayCreate_v2, (P *at, const struct array2 *a)) {
    if (!a) return INVALID;
    struct array3 x = {a->width, a->height, 0, a->format, a->channels, 0};
    return create_array(at, &x, 1, ARRAY);
}
static R destroy_array(P at, int kind) {
    R r = release(at, kind, kind);
    if (!r) unmap_parts(at);
    return r;
}
API(cuArrayDestroy, (P at)) { return destroy_array(at, ARRAY); }
API(cuMipmappedArrayCreate, (P *at, const struct array3 *a, U levels)) { return create_array(at, a, levels, MIPMAPPED); }
API(cuMipmappedArrayDestroy, (P at)) { return destroy_array(at, MIPMAPPED); }
struct requirements { size_t size, alignment; U reserved[4]; };
static R requirements(struct requirements *out, P at, int kind) {
    pthread_mutex_lock(&lock);
    struct memory *m = find(at, kind);
    int tells = m && !m->bytes; /* as the driver: only of arrays without memory of their own */
    if (tells) *out = (struct requirements){.size = 65536, .alignment = 65536};
    pthread_mutex_unlock(&lock);
    return tells ? OK : INVALID;
}
API(cuArrayGetMemoryRequirements, (struct requirements *out, P at, D d)) { (void)d; return requirements(out, at, ARRAY); }
API(cuMipmappedArrayGetMemoryRequirements, (struct requirements *out, P at, D d)) { (void)d; return requirements(out, at, MIPMAPPED); }

/* Virtual memory management */
struct location { int type, id; };
struct property { int type, handles; struct location location; V security; unsigned char rest[8]; };
static int on_device(struct location l) { return l.type == 1 || l.type == 6; }
static D device_at(struct location l) { return l.type == 6 ? l.id & 0xff : l.id; }
API(cuMemGetAllocationGranularity, (size_t *n, const struct property *p, int option)) { (void)p, (void)option; *n = 2 * MIB; return OK; }
API(cuMemCreate, (P *h, size_t n, const struct property *p, uint64_t flags)) {
    if (!h || !p || flags || !n || n % (2 * MIB)) return INVALID;
    if (!started) return NOT_INITIALIZED;
    if (on_device(p->location) && !gpu(device_at(p->location))) return NO_DEVICE;
    R r = on_device(p->location) ? take(device_at(p->location), n, DATA) : OK;
    if (!r) *h = add(0, n, on_device(p->location) ? HANDLE : HOST, device_at(p->location))->at;
    return r;
}
/* Frees the memory of a handle once neither a reference nor a mapping is left. Call with the lock, which it returns. */
static R unreferenced(struct memory *m) {
    struct memory out;
    int last = !m->references && !m->mappings, counts = m->kind == HANDLE;
    D d = m->device;
    uint64_t bytes = m->bytes;
    P at = m->at;
    int kind = m->kind;
    pthread_mutex_unlock(&lock);
    if (last) removed(at, kind, kind, &out);
    if (last && counts) give(d, bytes, DATA);
    return OK;
}
static struct memory *handle(P at) {
    struct memory *m = find(at, HANDLE);
    if (!m) m = find(at, HOST);
    return m ? m : find(at, IMPORTED);
}
API(cuMemRelease, (P h)) {
    pthread_mutex_lock(&lock);
    struct memory *m = handle(h);
    if (m && m->references) {
        m->references--;
        return unreferenced(m);
    }
    pthread_mutex_unlock(&lock);
    return INVALID;
}
API(cuMemAddressReserve, (P *at, size_t n, size_t alignment, P wanted, uint64_t flags)) {
    (void)alignment, (void)wanted, (void)flags;
    pthread_mutex_lock(&lock);
    *at = next_at, next_at += n;
    pthread_mutex_unlock(&lock);
    return OK;
}
API(cuMemAddressFree, (P at, size_t n)) { (void)at, (void)n; return OK; }
API(cuMemMap, (P at, size_t n, size_t offset, P h, uint64_t flags)) {
    (void)offset;
    if (flags) return INVALID;
    pthread_mutex_lock(&lock);
    struct memory *of = handle(h);
    if (of) of->mappings++;
    pthread_mutex_unlock(&lock);
    if (!of) return INVALID;
    add(at, n, RANGE, of->device)->of = of;
    return OK;
}
API(cuMemUnmap, (P at, size_t n)) {
    int found = 0;
    for (P end = at + n; at < end; found = 1) {
        struct memory m;
        if (!removed(at, RANGE, RANGE, &m)) return INVALID;
        at += m.bytes;
        pthread_mutex_lock(&lock);
        m.of->mappings--;
        unreferenced(m.of);
    }
    return found ? OK : INVALID;
}
/* A sparse array's part that is mapped is a range at an address that stands for it. */
struct array_map { int type; V array; int part_type; uint64_t part[4]; int operation, handle_type; P handle; size_t offset; U devices, flags, reserved[2]; };
API_PTSZ(cuMemMapArrayAsync, (struct array_map *list, U n, V stream), (list, n, S)) {
    R r = stream ? OK : BAD_CONTEXT;
    for (struct array_map *m = list; !r && m < list + n; m++) {
        P at = (P)m->array << 8 | m->part[0];
        r = m->operation == 1 ? cuMemMap(at, 1, 0, m->handle, 0) : cuMemUnmap(at, 1);
    }
    return r;
}
/* What is mapped into a sparse array, ends with it. */
static void unmap_parts(P array) {
    for (;;) {
        pthread_mutex_lock(&lock);
        struct memory *m = memories;
        while (m && (m->kind != RANGE || m->at >> 8 != array)) m = m->next;
        P at = m ? m->at : 0;
        pthread_mutex_unlock(&lock);
        if (!m) return;
        cuMemUnmap(at, 1);
    }
}
API(cuMemSetAccess, (P at, size_t n, V access, size_t count)) { (void)at, (void)n, (void)access, (void)count; return OK; }
API(cuMemRetainAllocationHandle, (P *h, P at)) {
    pthread_mutex_lock(&lock);
    struct memory *m = memories;
    while (m && !(m->kind == RANGE && at >= m->at && at < m->at + m->bytes)) m = m->next;
    if (m) m->of->references++, *h = m->of->at;
    pthread_mutex_unlock(&lock);
    return m ? OK : INVALID;
}
API(cuMemExportToShareableHandle, (V out, P h, int type, uint64_t flags)) { (void)type, (void)flags; *(int *)out = (int)(h >> 20); return OK; }
API(cuMemImportFromShareableHandle, (P *h, V shared, int type)) {
    (void)shared, (void)type;
    *h = add(0, 2 * MIB, IMPORTED, 0)->at;
    return OK;
}
struct ipc { char b[64]; };
API(cuIpcOpenMemHandle_v2, (P *at, struct ipc h, U flags)) { (void)h, (void)flags; *at = add(0, 2 * MIB, IMPORTED, 0)->at; return OK; }
API(cuIpcCloseMemHandle, (P at)) { struct memory m; return removed(at, IMPORTED, IMPORTED, &m) ? OK : INVALID; }

/* Pools: they give back at a synchronization what exceeds their threshold. */
struct pool_properties { int type, handles; struct location location; V security; size_t most; unsigned char rest[56]; };
API(cuDeviceGetDefaultMemPool, (V *p, D d)) { default_pool[d].device = d; *p = &default_pool[d]; return OK; }
API(cuDeviceGetMemPool, (V *p, D d)) { default_pool[d].device = d; *p = current_pool[d] ? current_pool[d] : &default_pool[d]; return OK; }
API(cuDeviceSetMemPool, (D d, V p)) { current_pool[d] = p; return OK; }
API(cuMemPoolCreate, (V *p, const struct pool_properties *x)) {
    if (!p || !x) return INVALID;
    struct pool *n = calloc(1, sizeof *n);
    n->device = device_at(x->location), n->host = !on_device(x->location);
    *p = n;
    return OK;
}
static R own_pool(V *p, const struct location *l, int type) {
    static struct pool managed;
    if (!p || !l) return INVALID;
    if (type == 1 && l->type == 1) return cuDeviceGetDefaultMemPool(p, l->id);
    *p = &managed;
    return type == 2 ? OK : INVALID;
}
API(cuMemGetDefaultMemPool, (V *p, const struct location *l, int type)) { return own_pool(p, l, type); }
API(cuMemGetMemPool, (V *p, const struct location *l, int type)) { return own_pool(p, l, type); }
static R from_pool(P *at, size_t n, struct pool *p, struct stream *s) {
    if (!s) return started ? BAD_CONTEXT : NOT_INITIALIZED;
    if (!at || !n) return INVALID;
    if (s->capture) {
        s->capture->bytes[s->ctx->device] += n;
        *at = add(0, 0, POOLED, s->ctx->device)->at;
        return OK;
    }
    spend(1000);
    n = (n + 511) / 512 * 512;
    pthread_mutex_lock(&lock);
    uint64_t want = p->used + n > p->reserved ? whole(p->used + n - p->reserved, STEP) : 0;
    R r = want && !p->host ? take(p->device, want, DATA) : OK;
    if (!r) p->reserved += want, p->used += n;
    if (p->reserved > p->high) p->high = p->reserved;
    pthread_mutex_unlock(&lock);
    if (r) return r;
    struct memory *m = add(0, n, POOLED, p->device);
    m->pool = p, *at = m->at;
    return OK;
}
API_PTSZ(cuMemAllocFromPoolAsync, (P *at, size_t n, V pool, V stream), (at, n, pool, S)) { return from_pool(at, n, pool, stream); }
API_PTSZ(cuMemAllocAsync, (P *at, size_t n, V stream), (at, n, S)) {
    struct stream *s = stream;
    V pool = NULL;
    if (s) cuDeviceGetMemPool(&pool, s->ctx->device);
    return from_pool(at, n, pool, s);
}
/* A destroyed pool ends with its last allocation. */
static void end_pool(struct pool *p) {
    if (!p->destroyed || p->used) return;
    if (!p->host) give(p->device, p->reserved, DATA);
    p->reserved = 0;
}
static R free_pooled(P at) {
    struct memory m;
    if (!removed(at, POOLED, POOLED, &m)) return INVALID;
    pthread_mutex_lock(&lock);
    if (m.pool) m.pool->used -= m.bytes, end_pool(m.pool);
    pthread_mutex_unlock(&lock);
    return OK;
}
API_PTSZ(cuMemFreeAsync, (P at, V stream), (at, S)) {
    if (!stream) return BAD_CONTEXT;
    struct memory m;
    if (!at || !free_pooled(at)) return OK;
    UNSAFE();
    if (!removed(at, PLAIN, MANAGED, &m)) return INVALID;
    free_later(m, stream);
    free_reached();
    return OK;
}
API(cuMemFree_v2, (P at)) { R r = release(at, PLAIN, MANAGED); return r == INVALID ? free_pooled(at) : r; }
API(cuMemPoolTrimTo, (V p, size_t keep)) {
    pthread_mutex_lock(&lock);
    trim(p, keep);
    pthread_mutex_unlock(&lock);
    return OK;
}
API(cuMemPoolDestroy, (V pool)) {
    struct pool *p = pool;
    for (int d = 0; d < GPUS; d++)
        if (p == &default_pool[d]) return INVALID;
        else if (p == current_pool[d]) current_pool[d] = NULL;
    pthread_mutex_lock(&lock);
    p->destroyed = 1;
    end_pool(p);
    pthread_mutex_unlock(&lock);
    return OK;
}
/* This thread's next question about a pool sets the word to 1 once the answer is fixed, and returns when it is 2: it loses its CPU. */
static __thread int *pool_held;
FREE API(cuFakeHoldPool, (int *word)) { pool_held = word; return OK; }
API(cuMemPoolGetAttribute, (V pool, int attribute, V value)) {
    struct pool *p = pool;
    if (!value || attribute < 1 || attribute > 8) return INVALID;
    if (attribute < 4) *(int *)value = 1;
    else *(uint64_t *)value = attribute == 4 ? p->threshold : attribute == 5 ? p->reserved : attribute == 6 ? p->high : p->used;
    for (int *held = pool_held; held; pool_held = held = NULL)
        for (__atomic_store_n(held, 1, __ATOMIC_SEQ_CST); __atomic_load_n(held, __ATOMIC_SEQ_CST) != 2; spend(100000)) {}
    return OK;
}
API(cuMemPoolSetAttribute, (V pool, int attribute, V value)) {
    if (attribute == 4) ((struct pool *)pool)->threshold = *(uint64_t *)value;
    return OK;
}

/* Stream capture and graphs */
/* An exec ends everything that the process has, as its end does. */
FREE API(cuFakeExec, (void)) {
    gpu_lock();
    gpu_advance();
    struct process *p = gpu_process(getpid(), 0);
    if (p) p->pid = 0;
    gpu_reap();
    gpu_unlock();
    return OK;
}
/* So long takes the next function: the thread loses its CPU. */
API(cuFakeExchangeNs, (unsigned ns)) { exchange_ns = (int)ns; return OK; }
API(cuThreadExchangeStreamCaptureMode, (int *mode)) {
    if (exchange_ns) spend(exchange_ns);
    int old = capture_mode;
    capture_mode = *mode, *mode = old;
    return OK;
}
static R begin_capture(struct stream *s, int mode, struct graph *g) {
    if (!s) return BAD_CONTEXT;
    if (s->capture || s == s->ctx->legacy) return CAPTURE_UNSUPPORTED;
    s->capture = g ? g : calloc(1, sizeof *g), s->mode = mode, s->invalid = 0;
    pthread_mutex_lock(&lock);
    captures_global += mode == 0;
    for (int i = 0; i < 64; i++)
        if (!capturing[i]) {
            capturing[i] = s;
            break;
        }
    pthread_mutex_unlock(&lock);
    captures_own += mode != 2;
    return OK;
}
API_PTSZ(cuStreamBeginCapture_v2, (V stream, int mode), (S, mode)) { return begin_capture(stream, mode, NULL); }
API_PTSZ(cuStreamBeginCaptureToGraph, (V stream, V g, V nodes, V edges, size_t n, int mode), (S, g, nodes, edges, n, mode)) { (void)nodes, (void)edges, (void)n; return g ? begin_capture(stream, mode, g) : INVALID; }
API_PTSZ(cuStreamBeginRecaptureToGraph, (V stream, int mode, V g, V differs, V data), (S, mode, g, differs, data)) { (void)differs, (void)data; return g ? begin_capture(stream, mode, g) : INVALID; }
API_PTSZ(cuStreamEndCapture, (V stream, V *graph), (S, graph)) {
    struct stream *s = stream;
    if (!s || !s->capture) return INVALID;
    pthread_mutex_lock(&lock);
    captures_global -= s->mode == 0;
    for (int i = 0; i < 64; i++)
        if (capturing[i] == s) capturing[i] = NULL;
    pthread_mutex_unlock(&lock);
    captures_own -= s->mode != 2;
    *graph = s->invalid ? NULL : s->capture;
    s->capture = NULL;
    return s->invalid ? CAPTURE_INVALIDATED : OK;
}
API_PTSZ(cuStreamIsCapturing, (V stream, int *status), (S, status)) {
    struct stream *s = stream;
    if (!s) return BAD_CONTEXT;
    *status = !s->capture ? 0 : s->invalid ? 2 : 1;
    return OK;
}
API(cuGraphCreate, (V *g, U flags)) { (void)flags; *g = calloc(1, sizeof(struct graph)); return OK; }
struct alloc_node { struct pool_properties pool; V access; size_t count, bytes; P at; };
API(cuGraphAddMemAllocNode, (V *node, V g, V dependencies, size_t n, struct alloc_node *x)) {
    (void)dependencies, (void)n;
    *node = g, x->at = add(0, 0, POOLED, x->pool.location.id)->at;
    ((struct graph *)g)->bytes[x->pool.location.id] += x->bytes;
    return OK;
}
struct any_node { int type, reserved[3]; struct alloc_node allocation; };
API(cuGraphAddNode, (V *node, V g, V after, size_t n, struct any_node *x)) { return x && x->type == 10 ? cuGraphAddMemAllocNode(node, g, after, n, &x->allocation) : INVALID; }
API(cuGraphAddNode_v2, (V *node, V g, V after, V edges, size_t n, struct any_node *x)) { (void)edges; return cuGraphAddNode(node, g, after, n, x); }
API(cuGraphAddNode_v3, (V *node, V g, V after, V edges, size_t n, struct any_node *x)) { (void)edges; return cuGraphAddNode(node, g, after, n, x); }
static R instantiate(V *exec, V g) {
    if (!g) return INVALID;
    *exec = memcpy(malloc(sizeof(struct graph)), g, sizeof(struct graph));
    return OK;
}
API(cuGraphInstantiateWithFlags, (V *exec, V g, uint64_t flags)) { (void)flags; return instantiate(exec, g); }
API(cuGraphInstantiate_v2, (V *exec, V g, V *node, char *log, size_t n)) { (void)node, (void)log, (void)n; return instantiate(exec, g); }
API(cuGraphDestroy, (V g)) { (void)g; return OK; }
API(cuGraphExecDestroy, (V exec)) { free(exec); return OK; }
/* The memory of a graph's allocations appears when it is first uploaded or launched. */
static R back(struct graph *g) {
    R r = OK;
    pthread_mutex_lock(&lock);
    for (int d = 0; d < devices && !r; d++) {
        uint64_t need = whole(g->bytes[d], 2 * MIB);
        if (need > graph_memory[d].reserved && !(r = take(d, need - graph_memory[d].reserved, DATA))) graph_memory[d].reserved = need;
        if (graph_memory[d].reserved > graph_memory[d].high) graph_memory[d].high = graph_memory[d].reserved;
    }
    pthread_mutex_unlock(&lock);
    return r;
}
API_PTSZ(cuGraphUpload, (V exec, V stream), (exec, S)) { return stream ? back(exec) : BAD_CONTEXT; }
/* With CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD the graph gets its memory here. */
struct instantiation { uint64_t flags; V upload_stream, node; int result; };
static R with_parameters(V *exec, V g, const struct instantiation *parameters) {
    R r = instantiate(exec, g);
    return r || !(parameters->flags & 2) ? r : back(*exec);
}
API(cuGraphInstantiateWithParams, (V *exec, V g, struct instantiation *parameters)) { return with_parameters(exec, g, parameters); }
API(cuGraphInstantiateWithParams_ptsz, (V *exec, V g, struct instantiation *parameters)) { return with_parameters(exec, g, parameters); }
API_PTSZ(cuGraphLaunch, (V exec, V stream), (exec, S)) {
    struct graph *g = exec;
    R r = stream ? back(g) : BAD_CONTEXT;
    if (r) return r;
    spend(LAUNCH_NS + g->kernels * 200);
    return submit(stream, g->ns, g->meeting, g->parties);
}
API(cuDeviceGetGraphMemAttribute, (D d, int attribute, uint64_t *value)) {
    if (!gpu(d) || attribute < 0 || attribute > 3) return INVALID;
    *value = attribute == 0 ? graph_memory[d].used : attribute == 3 ? graph_memory[d].high : graph_memory[d].reserved;
    return OK;
}
API(cuDeviceGraphMemTrim, (D d)) {
    pthread_mutex_lock(&lock);
    if (graph_memory[d].reserved) give(d, graph_memory[d].reserved, DATA);
    graph_memory[d].reserved = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
/* Checkpoints of other processes, by pid; structures and states are those of CUDA 12.8's cuda.h. What an H200 with driver 580 took for a
 * tenant with 4 and 36 GiB: 2.85 and 22.7 s to move it out, 1.17 and 6.3 s to move it back. In the file at FAKE_GPU with `.fails` behind
 * its name, each line `STEP PID RESULT` makes a step fail: `lock 0 600`; a pid of 0 is any; a RESULT below 0 also makes the process
 * FAILED; `die` kills the caller after the step began. */
#define CHECKPOINT_NS_PER_GIB 620000000LL
#define RESTORE_NS_PER_GIB 160000000LL
#define RESTORE_NS 450000000LL
struct arguments { uint64_t words[8]; };
FREE static int failure(const char *step, int pid, int *dies) {
    char path[4096], name[16], result[16];
    int which, r = 0;
    snprintf(path, sizeof path, "%s.fails", getenv("FAKE_GPU") ? getenv("FAKE_GPU") : "/fakegpu/model");
    FILE *f = fopen(path, "re");
    while (f && fscanf(f, "%15s %d %15s", name, &which, result) == 3) {
        if (strcmp(name, step) || (which && which != pid)) continue;
        if (strcmp(result, "die")) r = atoi(result);
        else *dies = 1;
    }
    if (f) fclose(f);
    return r;
}
FREE static int64_t step_ns(const struct process *p, int64_t ns_per_gib, int64_t ns) {
    uint64_t bytes = 0;
    for (int d = 0; d < model->gpus; d++) bytes += p->bytes[d] + p->context_bytes[d] + p->module_bytes[d];
    return (ns + (int64_t)(bytes / MIB) * ns_per_gib / 1024) / (model->checkpoint_speed > 0 ? model->checkpoint_speed : 1);
}
/* Does everything fit that the process had? */
FREE static int fits(const struct process *p) {
    for (int d = 0; d < model->gpus; d++)
        if (gpu_free_bytes(d) < p->bytes[d] + p->context_bytes[d] + p->module_bytes[d]) return 0;
    return 1;
}
/* Starts the step, with the lock. */
FREE static R begin_step(const char *step, struct process *p, int from, int to, int64_t ns, int *dies) {
    if (!p) return NOT_INITIALIZED;
    if (gpu_now() < p->step_ends_ns || gpu_state(p) != from) return ILLEGAL_STATE;
    p->state = p->next;
    R r = failure(step, p->pid, dies);
    if (r < 0) p->state = p->next = FAILED;
    if (r) return abs(r);
    if (from == CHECKPOINTED && p->unrestorable) return OPERATING_SYSTEM;
    if (from == CHECKPOINTED && !fits(p)) {
        p->unrestorable = 1;
        return NO_MEMORY;
    }
    __atomic_store_n(&p->next, to, __ATOMIC_SEQ_CST);
    p->step_ends_ns = gpu_now() + ns;
    return OK;
}
FREE static R step(const char *name, int pid, const struct arguments *a, unsigned first, int from, int to, int64_t ns_per_gib, int64_t ns) {
    int dies = 0;
    for (unsigned i = first; a && i < 8; i++)
        if (a->words[i]) return INVALID;
    if (!started) return NOT_INITIALIZED;
    if (pid <= 0 || gpu_ended(pid)) return INVALID;
    gpu_lock();
    gpu_reap();
    struct process *p = gpu_process(pid, 0);
    ns = p ? step_ns(p, ns_per_gib, ns) : 0;
    R r = begin_step(name, p, from, to, ns, &dies);
    int64_t until = gpu_now() + ns;
    gpu_unlock();
    if (dies) raise(SIGKILL);
    while (!r && ns && gpu_now() < until) {
        int64_t next = gpu_now() + 20000000;
        gpu_wait_until(next < until ? next : until);
        if (gpu_ended(pid)) return INVALID;
    }
    return r;
}
/* Has all work ended, with no thread in the driver? */
FREE static int rests(int pid) {
    gpu_lock();
    gpu_advance();
    struct process *p = gpu_process(pid, 0);
    int busy = p && __atomic_load_n(&p->calls, __ATOMIC_SEQ_CST);
    for (int i = 0; i < CONTEXTS; i++) busy |= model->context[i].pid == pid && model->context[i].done < model->context[i].submitted;
    gpu_unlock();
    return !busy;
}
FREE API(cuCheckpointProcessLock, (int pid, const struct arguments *a)) {
    int64_t timeout = a ? (int64_t)(a->words[0] & 0xffffffff) * 1000000 : 0, begun = gpu_now();
    if (a && a->words[0] >> 32) return INVALID;
    R r = step("lock", pid, a, 1, RUNNING, LOCKED, 0, 0);
    while (!r && !rests(pid)) {
        if (gpu_ended(pid)) return INVALID;
        if (timeout && gpu_now() - begun > timeout) {
            gpu_lock();
            struct process *p = gpu_process(pid, 0);
            if (p) p->state = p->next = RUNNING;
            gpu_unlock();
            return NOT_READY;
        }
        gpu_wait_until(gpu_now() + 200000);
    }
    return r;
}
FREE API(cuCheckpointProcessCheckpoint, (int pid, const struct arguments *a)) {
    return step("checkpoint", pid, a, 0, LOCKED, CHECKPOINTED, CHECKPOINT_NS_PER_GIB, 0);
}
/* Without other GPUs to restore to. */
FREE API(cuCheckpointProcessRestore, (int pid, const struct arguments *a)) {
    return step("restore", pid, a, 0, CHECKPOINTED, LOCKED, RESTORE_NS_PER_GIB, RESTORE_NS);
}
FREE API(cuCheckpointProcessUnlock, (int pid, const struct arguments *a)) { return step("unlock", pid, a, 0, LOCKED, RUNNING, 0, 0); }
FREE API(cuCheckpointProcessGetState, (int pid, int *state)) {
    int dies = 0;
    if (!state || pid <= 0 || gpu_ended(pid)) return INVALID;
    if (!started) return NOT_INITIALIZED;
    gpu_lock();
    struct process *p = gpu_process(pid, 0);
    R r = p ? failure("state", pid, &dies) : NOT_INITIALIZED;
    if (p) *state = gpu_state(p);
    gpu_unlock();
    return abs(r);
}
FREE API(cuGetErrorName, (R r, const char **name)) { *name = r == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return OK; }
FREE API(cuGetErrorString, (R r, const char **text)) { *text = r == NO_MEMORY ? "out of memory" : "fake error"; return OK; }
API(cuGetExportTable, (const void **table, const void *id)) { (void)table, (void)id; return NOT_SUPPORTED; }

/* cuGetProcAddress: the newest version of a function that the given CUDA version has, and its form for per-thread default streams. */
static const struct { const char *name; int since; } versions[] = {
    {"cuCtxCreate_v3", 11040}, {"cuCtxCreate_v4", 12050}, {"cuDevicePrimaryCtxRelease_v2", 11000}, {"cuDevicePrimaryCtxReset_v2", 11000},
    {"cuDeviceGetUuid_v2", 11040}, {"cuEventElapsedTime_v2", 12080}, {"cuGetProcAddress_v2", 12000}, {"cuIpcOpenMemHandle_v2", 11000},
    {"cuStreamBeginCapture_v2", 10010}, {"cuGraphInstantiate_v2", 11000}, {"cuMemAlloc_v4", 99000},
    {"cuGraphAddNode_v2", 12030}, {"cuGraphAddNode_v3", 13040},
};
FREE static V named(const char *name) {
    for (const struct entry *e = __start_api; e < __stop_api; e++)
        if (!strcmp(e->name, name)) return e->function;
    return NULL;
}
FREE static V resolve(const char *name, int version, uint64_t flags) {
    char text[128];
    if (!strcmp(name, "cuGraphInstantiate") && version >= 12000) name = "cuGraphInstantiateWithFlags";
    for (int v = 4; v > 0; v--) {
        int since = v > 1 ? 3020 : 0;
        snprintf(text, sizeof text, v > 1 ? "%s_v%d" : "%s", name, v);
        for (unsigned i = 0; i < sizeof versions / sizeof *versions; i++)
            if (!strcmp(text, versions[i].name)) since = versions[i].since;
        if (!named(text) || version < since) continue;
        V plain = named(text), other = NULL;
        size_t n = strlen(text);
        if (flags & 2) {
            strcpy(text + n, "_ptsz");
            if (!(other = named(text))) strcpy(text + n, "_ptds"), other = named(text);
        }
        return other ? other : plain;
    }
    return NULL;
}
FREE API(cuGetProcAddress, (const char *name, V *out, int version, uint64_t flags)) {
    *out = resolve(name, version, flags);
    return *out ? OK : NOT_FOUND;
}
FREE API(cuGetProcAddress_v2, (const char *name, V *out, int version, uint64_t flags, int *status)) {
    *out = resolve(name, version, flags);
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
