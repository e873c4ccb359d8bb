/* Wrappers of launches, of copies and memsets inside device memory, of captures, and of functions that end streams and contexts. */
#include "memory.h"

typedef unsigned int uint;
enum { SMALL_BYTES = 1 << 20 };

#define GATED(stream, per_thread, call)                                                                                            \
    do {                                                                                                                           \
        if (gm_needs_no_turn()) return call;                                                                                       \
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

GM_WRAPPER(cuLaunch, (CUfunction f)) { GATED(NULL, false, CALL(cuLaunch, f)); }
GM_WRAPPER(cuLaunchGrid, (CUfunction f, int x, int y)) { GATED(NULL, false, CALL(cuLaunchGrid, f, x, y)); }
GM_WRAPPER(cuLaunchGridAsync, (CUfunction f, int x, int y, CUstream s)) { GATED(s, false, CALL(cuLaunchGridAsync, f, x, y, s)); }

/* -- copies and memsets inside device memory ------------------------------------------------------------------------------------- */
/* Whether this is an address of device memory or managed memory. */
static bool on_device(CUdeviceptr at) {
    uint type = 0; /* 2, 2: CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE */
    return ASK(cuPointerGetAttribute, (uint *, int, CUdeviceptr), &type, 2, at) == CUDA_SUCCESS && type == 2;
}
/* Small copies, and copies from or to the host, need no turn. */
#define MOVED(bytes, inside, stream, per_thread, call)                                                                             \
    do {                                                                                                                           \
        if ((bytes) < SMALL_BYTES || !(inside)) return call;                                                                       \
        GATED(stream, per_thread, call);                                                                                           \
    } while (0)
/* A wrapper of a copy or memset; behind `stream` are the arguments of the driver's function. */
#define MOVES(symbol, per_thread, parameters, bytes, inside, stream, ...)                                                          \
    GM_WRAPPER(symbol, parameters) { MOVED(bytes, inside, stream, per_thread, CALL(symbol, __VA_ARGS__)); }
#define COPY(symbol, per_thread, inside) MOVES(symbol, per_thread, (CUdeviceptr to, CUdeviceptr from, size_t n), n, inside, NULL, to, from, n)
#define COPY_ASYNC(symbol, per_thread, inside)                                                                                     \
    MOVES(symbol, per_thread, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream), n, inside, stream, to, from, n, stream)
#define PEER(symbol, per_thread)                                                                                                   \
    MOVES(symbol, per_thread, (CUdeviceptr to, CUcontext c, CUdeviceptr from, CUcontext d, size_t n), n, true, NULL, to, c, from, d, n)
#define PEER_ASYNC(symbol, per_thread)                                                                                             \
    MOVES(symbol, per_thread, (CUdeviceptr to, CUcontext c, CUdeviceptr from, CUcontext d, size_t n, CUstream stream),             \
          n, true, stream, to, c, from, d, n, stream)
/* From and to arrays; `at`: a byte of an array. */
#define TO_ARRAY(symbol, per_thread)                                                                                               \
    MOVES(symbol, per_thread, (CUarray to, size_t at, CUdeviceptr from, size_t n), n, true, NULL, to, at, from, n)
#define FROM_ARRAY(symbol, per_thread)                                                                                             \
    MOVES(symbol, per_thread, (CUdeviceptr to, CUarray from, size_t at, size_t n), n, true, NULL, to, from, at, n)
#define ARRAYS(symbol, per_thread)                                                                                                 \
    MOVES(symbol, per_thread, (CUarray to, size_t to_at, CUarray from, size_t at, size_t n), n, true, NULL, to, to_at, from, at, n)
/* CUDA_MEMCPY2D, CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER, which has contexts in `unused` */
struct place2 { size_t x, y; int type; void *host; CUdeviceptr device; void *array; size_t pitch; };
struct place3 { size_t x, y, z, level; int type; void *host; CUdeviceptr device; void *array, *unused; size_t pitch, height; };
struct copy2 { struct place2 from, to; size_t width, height; };
struct copy3 { struct place3 from, to; size_t width, height, depth; };
static size_t copy2_bytes(const struct copy2 *c) { return c ? c->width * c->height : 0; }
static size_t copy3_bytes(const struct copy3 *c) { return c ? c->width * c->height * c->depth : 0; }
/* Types: 1 the host, 2 a device, 3 an array, 4 what the address says. */
#define INSIDE(place) ((place).type == 2 || (place).type == 3 || ((place).type == 4 && on_device((place).device)))
#define SHAPE(symbol, per_thread, type)                                                                                            \
    MOVES(symbol, per_thread, (const struct type *c), type##_bytes(c), INSIDE(c->from) && INSIDE(c->to), NULL, c)
#define SHAPE_ASYNC(symbol, per_thread, type)                                                                                      \
    MOVES(symbol, per_thread, (const struct type *c, CUstream stream), type##_bytes(c), INSIDE(c->from) && INSIDE(c->to), stream, c, stream)
/* How many bytes a batch copies inside device memory. Stops counting when the batch needs a turn. The driver is asked for each address,
 * since one batch may have copies of every direction. */
static uint64_t batch_bytes(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t n) {
    uint64_t all = 0, inside = 0;
    for (size_t i = 0; to && from && sizes && i < n; i++) all += sizes[i];
    for (size_t i = 0; all >= SMALL_BYTES && i < n && inside < SMALL_BYTES; i++)
        if (on_device(to[i]) && on_device(from[i])) inside += sizes[i];
    return inside;
}
/* CUDA_MEMCPY3D_BATCH_OP. Types: 1 an address, 2 an array; with an array the width is in elements of up to 16 bytes. */
struct operand { int type; CUdeviceptr device; size_t rest[3]; };
struct batched { struct operand from, to; size_t width, height, depth; int order, flags; };
static bool operand_inside(const struct operand *o) { return o->type == 2 || on_device(o->device); }
static uint64_t batch3_bytes(const struct batched *list, size_t n) {
    uint64_t inside = 0;
    for (const struct batched *c = list; list && c < list + n && inside < SMALL_BYTES; c++)
        if (operand_inside(&c->from) && operand_inside(&c->to))
            inside += c->width * c->height * c->depth * (c->from.type == 2 || c->to.type == 2 ? 16 : 1);
    return inside;
}
#define LISTS CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n, void *attributes, size_t *which, size_t kinds
#define BATCH_V1(symbol, per_thread)                                                                                               \
    MOVES(symbol, per_thread, (LISTS, size_t *failed, CUstream stream),                                                            \
          batch_bytes(to, from, sizes, n), true, stream, to, from, sizes, n, attributes, which, kinds, failed, stream)
#define BATCH(symbol, per_thread)                                                                                                  \
    MOVES(symbol, per_thread, (LISTS, CUstream stream),                                                                            \
          batch_bytes(to, from, sizes, n), true, stream, to, from, sizes, n, attributes, which, kinds, stream)
#define BATCH3_V1(symbol, per_thread)                                                                                              \
    MOVES(symbol, per_thread, (size_t n, struct batched *list, size_t *failed, unsigned long long flags, CUstream stream),         \
          batch3_bytes(list, n), true, stream, n, list, failed, flags, stream)
#define BATCH3(symbol, per_thread)                                                                                                 \
    MOVES(symbol, per_thread, (size_t n, struct batched *list, unsigned long long flags, CUstream stream),                         \
          batch3_bytes(list, n), true, stream, n, list, flags, stream)
#define BOX(symbol, per_thread)                                                                                                    \
    MOVES(symbol, per_thread, (struct batched *c, unsigned long long flags, CUstream stream), batch3_bytes(c, 1), true, stream, c, flags, stream)
#define WITH_ATTRIBUTES(symbol, per_thread)                                                                                        \
    MOVES(symbol, per_thread, (CUdeviceptr to, CUdeviceptr from, size_t n, void *attributes, CUstream stream),                     \
          n, on_device(to) && on_device(from), stream, to, from, n, attributes, stream)
/* CUDA_FABRIC_COPY_BATCH_OP: from or to the memory of another GPU, which has an address or a number. */
struct fabric { uint64_t from[3], to[3]; size_t bytes; uint flags; };
static uint64_t fabric_bytes(const struct fabric *list, size_t n) {
    uint64_t all = 0;
    for (const struct fabric *c = list; list && c < list + n; c++) all += c->bytes;
    return all;
}
#define FABRIC(symbol, per_thread)                                                                                                 \
    MOVES(symbol, per_thread, (size_t n, struct fabric *list, unsigned long long flags, CUstream stream),                          \
          fabric_bytes(list, n), true, stream, n, list, flags, stream)
#define DECOMPRESS(symbol, per_thread)                                                                                             \
    GM_WRAPPER(symbol, (void *list, size_t n, uint flags, size_t *failed, CUstream stream)) {                                      \
        GATED(stream, per_thread, CALL(symbol, list, n, flags, failed, stream));                                                   \
    }
#define FILL(symbol, per_thread, type)                                                                                             \
    MOVES(symbol, per_thread, (CUdeviceptr to, type value, size_t n), n * sizeof(type), true, NULL, to, value, n)
#define FILL_ASYNC(symbol, per_thread, type)                                                                                       \
    MOVES(symbol, per_thread, (CUdeviceptr to, type value, size_t n, CUstream stream), n * sizeof(type), true, stream, to, value, n, stream)
#define FILL2(symbol, per_thread, type)                                                                                            \
    MOVES(symbol, per_thread, (CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows),                               \
          width * rows * sizeof(type), true, NULL, to, pitch, value, width, rows)
#define FILL2_ASYNC(symbol, per_thread, type)                                                                                      \
    MOVES(symbol, per_thread, (CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows, CUstream stream),              \
          width * rows * sizeof(type), true, stream, to, pitch, value, width, rows, stream)
COPY(cuMemcpyDtoD_v2, false, true) COPY(cuMemcpyDtoD_v2_ptds, true, true)
COPY(cuMemcpy, false, on_device(to) && on_device(from)) COPY(cuMemcpy_ptds, true, on_device(to) && on_device(from))
COPY_ASYNC(cuMemcpyDtoDAsync_v2, false, true) COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, true, true)
COPY_ASYNC(cuMemcpyAsync, false, on_device(to) && on_device(from)) COPY_ASYNC(cuMemcpyAsync_ptsz, true, on_device(to) && on_device(from))
TO_ARRAY(cuMemcpyDtoA_v2, false) TO_ARRAY(cuMemcpyDtoA_v2_ptds, true)
FROM_ARRAY(cuMemcpyAtoD_v2, false) FROM_ARRAY(cuMemcpyAtoD_v2_ptds, true)
ARRAYS(cuMemcpyAtoA_v2, false) ARRAYS(cuMemcpyAtoA_v2_ptds, true)
PEER(cuMemcpyPeer, false) PEER(cuMemcpyPeer_ptds, true)
PEER_ASYNC(cuMemcpyPeerAsync, false) PEER_ASYNC(cuMemcpyPeerAsync_ptsz, true)
SHAPE(cuMemcpy2D_v2, false, copy2) SHAPE(cuMemcpy2D_v2_ptds, true, copy2)
SHAPE(cuMemcpy2DUnaligned_v2, false, copy2) SHAPE(cuMemcpy2DUnaligned_v2_ptds, true, copy2)
SHAPE(cuMemcpy3D_v2, false, copy3) SHAPE(cuMemcpy3D_v2_ptds, true, copy3)
SHAPE_ASYNC(cuMemcpy2DAsync_v2, false, copy2) SHAPE_ASYNC(cuMemcpy2DAsync_v2_ptsz, true, copy2)
SHAPE_ASYNC(cuMemcpy3DAsync_v2, false, copy3) SHAPE_ASYNC(cuMemcpy3DAsync_v2_ptsz, true, copy3)
SHAPE(cuMemcpy3DPeer, false, copy3) SHAPE(cuMemcpy3DPeer_ptds, true, copy3)
SHAPE_ASYNC(cuMemcpy3DPeerAsync, false, copy3) SHAPE_ASYNC(cuMemcpy3DPeerAsync_ptsz, true, copy3)
BATCH_V1(cuMemcpyBatchAsync, false) BATCH_V1(cuMemcpyBatchAsync_ptsz, true)
BATCH(cuMemcpyBatchAsync_v2, false) BATCH(cuMemcpyBatchAsync_v2_ptsz, true)
BATCH3_V1(cuMemcpy3DBatchAsync, false) BATCH3_V1(cuMemcpy3DBatchAsync_ptsz, true)
BATCH3(cuMemcpy3DBatchAsync_v2, false) BATCH3(cuMemcpy3DBatchAsync_v2_ptsz, true)
BOX(cuMemcpy3DWithAttributesAsync, false) BOX(cuMemcpy3DWithAttributesAsync_ptsz, true)
WITH_ATTRIBUTES(cuMemcpyWithAttributesAsync, false) WITH_ATTRIBUTES(cuMemcpyWithAttributesAsync_ptsz, true)
FABRIC(cuFabricCpyBatchAsync, false) FABRIC(cuFabricCpyBatchAsync_ptsz, true)
DECOMPRESS(cuMemBatchDecompressAsync, false) DECOMPRESS(cuMemBatchDecompressAsync_ptsz, true)
FILL(cuMemsetD8_v2, false, uint8_t) FILL(cuMemsetD8_v2_ptds, true, uint8_t)
FILL_ASYNC(cuMemsetD8Async, false, uint8_t) FILL_ASYNC(cuMemsetD8Async_ptsz, true, uint8_t)
FILL2(cuMemsetD2D8_v2, false, uint8_t) FILL2(cuMemsetD2D8_v2_ptds, true, uint8_t)
FILL2_ASYNC(cuMemsetD2D8Async, false, uint8_t) FILL2_ASYNC(cuMemsetD2D8Async_ptsz, true, uint8_t)
FILL(cuMemsetD16_v2, false, uint16_t) FILL(cuMemsetD16_v2_ptds, true, uint16_t)
FILL_ASYNC(cuMemsetD16Async, false, uint16_t) FILL_ASYNC(cuMemsetD16Async_ptsz, true, uint16_t)
FILL2(cuMemsetD2D16_v2, false, uint16_t) FILL2(cuMemsetD2D16_v2_ptds, true, uint16_t)
FILL2_ASYNC(cuMemsetD2D16Async, false, uint16_t) FILL2_ASYNC(cuMemsetD2D16Async_ptsz, true, uint16_t)
FILL(cuMemsetD32_v2, false, uint) FILL(cuMemsetD32_v2_ptds, true, uint)
FILL_ASYNC(cuMemsetD32Async, false, uint) FILL_ASYNC(cuMemsetD32Async_ptsz, true, uint)
FILL2(cuMemsetD2D32_v2, false, uint) FILL2(cuMemsetD2D32_v2_ptds, true, uint)
FILL2_ASYNC(cuMemsetD2D32Async, false, uint) FILL2_ASYNC(cuMemsetD2D32Async_ptsz, true, uint)

#define CAPTURES(symbol, per_thread, parameters, ...)                                                                              \
    GM_WRAPPER(symbol, parameters) {                                                                                               \
        gm_capture_begins(stream, per_thread);                                                                                     \
        CUresult result = CALL(symbol, __VA_ARGS__);                                                                               \
        if (result != CUDA_SUCCESS) gm_capture_ended();                                                                            \
        return result;                                                                                                             \
    }
#define BEGIN_CAPTURE_V1(symbol, per_thread) CAPTURES(symbol, per_thread, (CUstream stream), stream)
#define BEGIN_CAPTURE(symbol, per_thread) CAPTURES(symbol, per_thread, (CUstream stream, int mode), stream, mode)
#define BEGIN_CAPTURE_TO_GRAPH(symbol, per_thread)                                                                                 \
    CAPTURES(symbol, per_thread, (CUstream stream, CUgraph graph, const void *nodes, const void *edges, size_t n, int mode),       \
             stream, graph, nodes, edges, n, mode)
#define BEGIN_RECAPTURE(symbol, per_thread)                                                                                        \
    CAPTURES(symbol, per_thread, (CUstream stream, int mode, CUgraph graph, void *differs, void *data), stream, mode, graph, differs, data)
BEGIN_CAPTURE_V1(cuStreamBeginCapture, false)
BEGIN_CAPTURE_V1(cuStreamBeginCapture_ptsz, true)
BEGIN_CAPTURE(cuStreamBeginCapture_v2, false)
BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, true)
BEGIN_CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph, false)
BEGIN_CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz, true)
BEGIN_RECAPTURE(cuStreamBeginRecaptureToGraph, false)
BEGIN_RECAPTURE(cuStreamBeginRecaptureToGraph_ptsz, true)

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

/* The last release ends a primary context. Its streams are forgotten then, but not the streams of the device's other contexts. */
static void forget_primary(CUdevice d, int change) {
    CUcontext primary = gm_primary_context(d);
    if (gm_primary_references(d, change) <= 0 && primary) gm_streams_forget_context(primary);
}
#define PRIMARY_RELEASED(symbol)                                                                                                   \
    GM_WRAPPER(symbol, (CUdevice d)) {                                                                                             \
        forget_primary(d, -1);                                                                                                     \
        CUresult r = CALL(symbol, d);                                                                                              \
        if (r == CUDA_SUCCESS) gm_memory_primary_changed(d);                                                                       \
        else gm_primary_references(d, 1);                                                                                          \
        return r;                                                                                                                  \
    }
PRIMARY_RELEASED(cuDevicePrimaryCtxRelease)
PRIMARY_RELEASED(cuDevicePrimaryCtxRelease_v2)
/* A green context may hold the last reference to a primary context. */
GM_WRAPPER(cuGreenCtxDestroy, (void *green)) {
    CUcontext context = NULL;
    if (ASK(cuCtxFromGreenCtx, (CUcontext *, void *), &context, green) == CUDA_SUCCESS) gm_streams_forget_context(context);
    for (CUdevice d = 0; d < 64; d++) forget_primary(d, 0);
    return CALL(cuGreenCtxDestroy, green);
}
