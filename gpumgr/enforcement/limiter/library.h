/* libgpumgr.so, which each process of a limited container preloads: what its source files offer each other.
 *
 * dlsym.S, hooks.c  the table of hooked functions; which look-ups of functions get a hook
 * stubs.S           the hooked functions themselves
 * process.c         the pages, this process's slot, its devices; suspension; fork
 * gate.c            the turn: waits for it, gives it back; the helper thread
 * streams.c         streams and markers (events): which work has not ended
 * launch.c          wrappers of launches, copies, memsets, captures and destructions
 * memory.c          wrappers of allocations; queries.c wrappers of queries
 * ledger.c          the count of the container's memory; records.c what each pointer and handle holds
 *
 * No lock is held over a driver call. A fault of the library disables it (gm_disable) and never ends the program. */
#ifndef GPUMGR_LIBRARY_H
#define GPUMGR_LIBRARY_H
#include "pages.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* -- the driver's types: only what the wrappers need; handles are pointers ------------------------------------------------- */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUevent, *CUfunction, *CUgraphExec, *CUgraph, *CUarray;
enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
};

/* -- hooks ------------------------------------------------------------------------------------------------------------------
 * A hook is a function with the name and the signature of the driver's, defined with GM_WRAPPER, and an entry in hooks.h that expands to
 *     HOOK(symbol, "base name", first CUDA version, GM_ANY | GM_PTSZ)
 * for example HOOK(cuMemAlloc_v2, "cuMemAlloc", 3020, GM_ANY). Base name and version are the key of cuGetProcAddress; GM_PTSZ
 * marks the variant for per-thread default streams (its symbol ends with _ptsz or _ptds). NVML's functions have a version of 0:
 * they are found by dlsym and by linking only. PASS, in the same form, is an entry for a function without a wrapper.
 * The symbol itself is a stub (stubs.S): it waits while the container is suspended, then jumps to the wrapper or the driver.
 * The wrapper calls the driver with CALL(symbol, arguments...), which returns GM_NOT_FOUND if the driver lacks the function. */
#define GM_WRAPPER(symbol, parameters) CUresult symbol parameters __asm__("gm_w_" #symbol); CUresult symbol parameters
enum { GM_ANY, GM_PTSZ };
#define HOOK(symbol, base, version, variant) GM_HOOK_##symbol,
enum gm_hook {
#include "hooks.h"
    GM_HOOKS
};
#undef HOOK
/* The driver's function behind a hook, or NULL. */
void *gm_real(enum gm_hook hook);
/* A function of libcuda or libnvidia-ml that is not hooked, or NULL; the answer is not cached. */
void *gm_driver_function(const char *symbol);
/* Calls such a function with parameters of these types; GM_NOT_FOUND if the driver lacks it. */
#define ASK(symbol, types, ...)                                                                                                    \
    ({                                                                                                                             \
        static CUresult(*_Atomic known_) types;                                                                                    \
        if (!known_) known_ = (CUresult(*) types)gm_driver_function(#symbol);                                                      \
        known_ ? known_(__VA_ARGS__) : GM_NOT_FOUND(#symbol);                                                                      \
    })
#define CALL(symbol, ...)                                                                                                          \
    ({                                                                                                                             \
        __typeof__(&symbol) real_ = (__typeof__(&symbol))gm_real(GM_HOOK_##symbol);                                                \
        real_ ? real_(__VA_ARGS__) : GM_NOT_FOUND(#symbol);                                                                        \
    })
/* CUDA_ERROR_NOT_FOUND, or NVML_ERROR_FUNCTION_NOT_FOUND */
#define GM_NOT_FOUND(symbol) ((symbol)[0] == 'n' ? 13 : CUDA_ERROR_NOT_FOUND)

/* -- this process ---------------------------------------------------------------------------------------------------------- */
struct gm_process {
    const struct gm_limits *limits; /* mapped read-only */
    struct gm_use *use;
    struct gm_turn *turn;
    struct gm_use_slot *slot; /* of this process; NULL: all slots are taken */
    uint32_t slot_index;      /* GM_SLOTS without a slot */
    uint32_t pid;
};
/* This process and its pages; NULL: the process is not limited (there are no pages, or the library has a fault). The first call maps the
 * pages and claims a slot; after a failure the next call tries again. Later calls are cheap. Never call it from dlsym. */
struct gm_process *gm_process(void);
/* The index into the pages' gpu[] of a device, by its UUID; -1: it is not limited. Needs a cuInit that succeeded. */
int gm_gpu_of_device(CUdevice device);
/* The device of the thread's current context, -1 without one; and its index into the pages' gpu[]. */
CUdevice gm_current_device(void);
int gm_current_gpu(void);
/* Disables the library in this process: from now on every wrapper only calls the driver. Says why on stderr and in the page, once. */
void gm_disable(const char *why, const char *remedy);
/* Frees the slots of processes of this PID namespace that have died; returns how many. */
int gm_reap_slots(void);
/* The slots below this index may be in use. */
int gm_slots(void);
uint64_t gm_now(void); /* CLOCK_MONOTONIC */
void gm_nap(uint64_t ns);

/* Waits while the container is suspended, and asks for its resume: a call that entered the driver would block there. */
void gm_await_resume(void);
bool gm_suspended(void);

/* Between gm_relax and gm_unrelax, this thread may make calls of the driver that a stream capture in another thread would forbid. */
int gm_relax(void);
void gm_unrelax(int previous);

/* -- the gate -------------------------------------------------------------------------------------------------------------- */
struct gm_pass {
    struct gm_gate *gate; /* NULL: the launch needs no turn */
    struct gm_stream *stream;
    int cancel; /* the thread's cancellation state before gm_enter */
};
/* Whether any launch may pass at once: the container has one GPU, and does not share it. If so, the launch is also counted. */
bool gm_needs_no_turn(void);
/* Waits until a launch into this stream may pass. per_thread: the stream NULL is the per-thread default stream. */
struct gm_pass gm_enter(CUstream stream, bool per_thread);
/* After the driver's call. */
void gm_leave(struct gm_pass pass);
/* A point in a stream, behind all that was put into it before. */
struct gm_point {
    struct gm_stream *stream; /* NULL: the driver would refuse the stream, or its GPU is not limited */
    uint32_t marker;
};
struct gm_point gm_point_in(CUstream stream, bool per_thread);
/* Whether the work before the point, or its context, has ended. */
bool gm_passed(struct gm_point point);
/* Whether the stream is being captured, or the driver would refuse the stream. */
bool gm_stream_captures(CUstream stream, bool per_thread);
void gm_capture_begins(CUstream stream, bool per_thread);
void gm_capture_ended(void);
/* Call these before the driver's call: afterwards the driver no longer knows the streams. */
void gm_stream_destroyed(CUstream stream);
void gm_streams_forget_context(CUcontext context);
void gm_streams_forget_device(CUdevice device);
/* In the child after fork: no CUDA, no helper, no slot. */
void gm_gate_after_fork(void);
void gm_streams_after_fork(void);
#endif
