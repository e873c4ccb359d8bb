/* Wrappers of launches and of what ends a context. */
#include "memory.h"

#define GRAPH_LAUNCH(symbol)                                                                                                       \
    GM_EXPORT CUresult symbol(CUgraphExec graph, CUstream stream) {                                                                \
        CUresult r = CALL(symbol, graph, stream);                                                                                  \
        if (r == CUDA_SUCCESS) gm_graph_memory();                                                                                  \
        return r;                                                                                                                  \
    }
GRAPH_LAUNCH(cuGraphLaunch)
GRAPH_LAUNCH(cuGraphLaunch_ptsz)

#define CONTEXT_ENDS(symbol, type, ended)                                                                                          \
    GM_EXPORT CUresult symbol(type which) {                                                                                        \
        CUresult r = CALL(symbol, which);                                                                                          \
        if (r == CUDA_SUCCESS) ended(which);                                                                                       \
        return r;                                                                                                                  \
    }
CONTEXT_ENDS(cuCtxDestroy, CUcontext, gm_memory_context_ended)
CONTEXT_ENDS(cuCtxDestroy_v2, CUcontext, gm_memory_context_ended)
CONTEXT_ENDS(cuDevicePrimaryCtxReset, CUdevice, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxReset_v2, CUdevice, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxRelease, CUdevice, gm_memory_primary_changed)
CONTEXT_ENDS(cuDevicePrimaryCtxRelease_v2, CUdevice, gm_memory_primary_changed)
