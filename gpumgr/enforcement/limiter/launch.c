/* Wrappers of launches, copies and memsets inside device memory, captures, and of what ends streams and contexts. */
#include "memory.h"

typedef unsigned int uint;
enum { SMALL_BYTES = 1 << 20 }; /* smaller copies and memsets pass */

#define GATED(stream, per_thread, call)                                                                                            \
    do {                                                                                                                           \
        struct gm_pass pass = gm_enter(stream, per_thread);                                                                        \
        CUresult result = call;                                                                                                    \
        gm_leave(pass);                                                                                                            \
        return result;                                                                                                             \
    } while (0)

#define LAUNCH(symbol, per_thread)                                                                                                 \
    GM_WRAPPER(symbol, (CUfunction f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, CUstream stream,          \
                              void **parameters, void **extra)) {                                                                  \
        GATED(stream, per_thread, CALL(symbol, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));                     \
    }
LAUNCH(cuLaunchKernel, false)
LAUNCH(cuLaunchKernel_ptsz, true)

struct launch_config { uint grid[3], block[3], shared; CUstream stream; void *attributes; uint count; };
#define LAUNCH_EX(symbol, per_thread)                                                                                              \
    GM_WRAPPER(symbol, (const struct launch_config *config, CUfunction f, void **parameters, void **extra)) {                      \
        if (!config) return CALL(symbol, config, f, parameters, extra);                                                            \
        GATED(config->stream, per_thread, CALL(symbol, config, f, parameters, extra));                                             \
    }
LAUNCH_EX(cuLaunchKernelEx, false)
LAUNCH_EX(cuLaunchKernelEx_ptsz, true)

#define COOPERATIVE(symbol, per_thread)                                                                                            \
    GM_WRAPPER(symbol, (CUfunction f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, CUstream stream,          \
                              void **parameters)) {                                                                                \
        GATED(stream, per_thread, CALL(symbol, f, gx, gy, gz, bx, by, bz, shared, stream, parameters));                            \
    }
COOPERATIVE(cuLaunchCooperativeKernel, false)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

/* One launch on each of several GPUs: it needs the turn of all of them. */
struct cooperative { CUfunction f; uint grid[3], block[3], shared; CUstream stream; void **parameters; };
GM_WRAPPER(cuLaunchCooperativeKernelMultiDevice, (struct cooperative *list, uint n, uint flags)) {
    struct gm_pass passes[GM_GPUS];
    uint entered = 0;
    for (; list && entered < n && entered < GM_GPUS; entered++) passes[entered] = gm_enter(list[entered].stream, false);
    CUresult r = CALL(cuLaunchCooperativeKernelMultiDevice, list, n, flags);
    while (entered) gm_leave(passes[--entered]);
    return r;
}

#define GRAPH_LAUNCH(symbol, per_thread)                                                                                           \
    GM_WRAPPER(symbol, (CUgraphExec graph, CUstream stream)) {                                                                     \
        struct gm_pass pass = gm_enter(stream, per_thread);                                                                        \
        CUresult r = CALL(symbol, graph, stream);                                                                                  \
        gm_leave(pass);                                                                                                            \
        if (r == CUDA_SUCCESS) gm_graph_memory();                                                                                  \
        return r;                                                                                                                  \
    }
GRAPH_LAUNCH(cuGraphLaunch, false)
GRAPH_LAUNCH(cuGraphLaunch_ptsz, true)

#define COPY(symbol, per_thread)                                                                                                   \
    GM_WRAPPER(symbol, (CUdeviceptr to, CUdeviceptr from, size_t n)) {                                                             \
        if (n < SMALL_BYTES) return CALL(symbol, to, from, n);                                                                     \
        GATED(NULL, per_thread, CALL(symbol, to, from, n));                                                                        \
    }
#define COPY_ASYNC(symbol, per_thread)                                                                                             \
    GM_WRAPPER(symbol, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream)) {                                            \
        if (n < SMALL_BYTES) return CALL(symbol, to, from, n, stream);                                                             \
        GATED(stream, per_thread, CALL(symbol, to, from, n, stream));                                                              \
    }
#define FILL(symbol, type, per_thread)                                                                                             \
    GM_WRAPPER(symbol, (CUdeviceptr to, type value, size_t n)) {                                                                   \
        if (n < SMALL_BYTES / sizeof(type)) return CALL(symbol, to, value, n);                                                     \
        GATED(NULL, per_thread, CALL(symbol, to, value, n));                                                                       \
    }
#define FILL_ASYNC(symbol, type, per_thread)                                                                                       \
    GM_WRAPPER(symbol, (CUdeviceptr to, type value, size_t n, CUstream stream)) {                                                  \
        if (n < SMALL_BYTES / sizeof(type)) return CALL(symbol, to, value, n, stream);                                             \
        GATED(stream, per_thread, CALL(symbol, to, value, n, stream));                                                             \
    }
COPY(cuMemcpyDtoD_v2, false)
COPY(cuMemcpyDtoD_v2_ptds, true)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, false)
COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, true)
FILL(cuMemsetD8_v2, unsigned char, false)
FILL(cuMemsetD8_v2_ptds, unsigned char, true)
FILL(cuMemsetD32_v2, uint, false)
FILL(cuMemsetD32_v2_ptds, uint, true)
FILL_ASYNC(cuMemsetD8Async, unsigned char, false)
FILL_ASYNC(cuMemsetD8Async_ptsz, unsigned char, true)
FILL_ASYNC(cuMemsetD32Async, uint, false)
FILL_ASYNC(cuMemsetD32Async_ptsz, uint, true)

#define CAPTURING(stream, per_thread, call)                                                                                        \
    do {                                                                                                                           \
        gm_capture_begins(stream, per_thread);                                                                                     \
        CUresult result = call;                                                                                                    \
        if (result != CUDA_SUCCESS) gm_capture_ended();                                                                            \
        return result;                                                                                                             \
    } while (0)
#define BEGIN_CAPTURE_V1(symbol, per_thread)                                                                                       \
    GM_WRAPPER(symbol, (CUstream stream)) { CAPTURING(stream, per_thread, CALL(symbol, stream)); }
#define BEGIN_CAPTURE(symbol, per_thread)                                                                                          \
    GM_WRAPPER(symbol, (CUstream stream, int mode)) { CAPTURING(stream, per_thread, CALL(symbol, stream, mode)); }
#define BEGIN_CAPTURE_TO_GRAPH(symbol, per_thread)                                                                                 \
    GM_WRAPPER(symbol, (CUstream stream, CUgraph graph, const void *nodes, const void *edges, size_t n, int mode)) {               \
        CAPTURING(stream, per_thread, CALL(symbol, stream, graph, nodes, edges, n, mode));                                         \
    }
BEGIN_CAPTURE_V1(cuStreamBeginCapture, false)
BEGIN_CAPTURE_V1(cuStreamBeginCapture_ptsz, true)
BEGIN_CAPTURE(cuStreamBeginCapture_v2, false)
BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, true)
BEGIN_CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph, false)
BEGIN_CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz, true)

enum { INVALIDATED = 901, UNJOINED = 904 }; /* errors that end a capture */
#define END_CAPTURE(symbol)                                                                                                        \
    GM_WRAPPER(symbol, (CUstream stream, CUgraph *graph)) {                                                                        \
        CUresult r = CALL(symbol, stream, graph);                                                                                  \
        if (r == CUDA_SUCCESS || r == INVALIDATED || r == UNJOINED) gm_capture_ended();                                            \
        return r;                                                                                                                  \
    }
END_CAPTURE(cuStreamEndCapture)
END_CAPTURE(cuStreamEndCapture_ptsz)

#define STREAM_ENDS(symbol)                                                                                                        \
    GM_WRAPPER(symbol, (CUstream stream)) {                                                                                        \
        gm_stream_destroyed(stream);                                                                                               \
        return CALL(symbol, stream);                                                                                               \
    }
STREAM_ENDS(cuStreamDestroy)
STREAM_ENDS(cuStreamDestroy_v2)

#define CONTEXT_ENDS(symbol, type, forget, ended)                                                                                  \
    GM_WRAPPER(symbol, (type which)) {                                                                                             \
        forget(which);                                                                                                             \
        CUresult r = CALL(symbol, which);                                                                                          \
        if (r == CUDA_SUCCESS) ended(which);                                                                                       \
        return r;                                                                                                                  \
    }
CONTEXT_ENDS(cuCtxDestroy, CUcontext, gm_streams_forget_context, gm_memory_context_ended)
CONTEXT_ENDS(cuCtxDestroy_v2, CUcontext, gm_streams_forget_context, gm_memory_context_ended)
CONTEXT_ENDS(cuDevicePrimaryCtxReset, CUdevice, gm_streams_forget_device, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxReset_v2, CUdevice, gm_streams_forget_device, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxRelease, CUdevice, gm_streams_forget_device, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxRelease_v2, CUdevice, gm_streams_forget_device, gm_memory_primary_changed)
