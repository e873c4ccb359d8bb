/* Every hooked function: HOOK(symbol, base name, first CUDA version, variant); see library.h. The lines below have one entry for a function
 * and its further symbols: behind the name are the CUDA versions of the first symbol and of _v2; PTSZ and PTDS add the variant for
 * per-thread default streams, which CUDA 7 introduced. A newer function has this variant from its own version on, although its entry says
 * 7000: before its own version the driver finds neither variant. */
#ifndef PASS
#define PASS HOOK
#endif
#define HOOK1(name, version) HOOK(name, #name, version, GM_ANY)
#define HOOK2(name, version, second) HOOK1(name, version) HOOK(name##_v2, #name, second, GM_ANY)
#define HOOK_PTDS(name, version) HOOK1(name, version) HOOK(name##_ptds, #name, 7000, GM_PTSZ)
#define HOOK_PTSZ(name, version) HOOK1(name, version) HOOK(name##_ptsz, #name, 7000, GM_PTSZ)
#define HOOK2_BOTH_PTSZ(name, version, second)                                                                                     \
    HOOK2(name, version, second) HOOK(name##_ptsz, #name, version, GM_PTSZ) HOOK(name##_v2_ptsz, #name, second, GM_PTSZ)
/* The function's first version has addresses of 32 bits and no wrapper. */
#define HOOK2_PTDS(name) PASS(name, #name, 2000, GM_ANY) HOOK(name##_v2, #name, 3020, GM_ANY) HOOK(name##_v2_ptds, #name, 7000, GM_PTSZ)
#define HOOK2_PTSZ(name) PASS(name, #name, 2000, GM_ANY) HOOK(name##_v2, #name, 3020, GM_ANY) HOOK(name##_v2_ptsz, #name, 7000, GM_PTSZ)
HOOK2(cuGetProcAddress, 11030, 12000)
HOOK1(cuLaunch, 2000) HOOK1(cuLaunchGrid, 2000) HOOK1(cuLaunchGridAsync, 2000)
HOOK_PTSZ(cuLaunchKernel, 4000) HOOK_PTSZ(cuLaunchKernelEx, 11060)
HOOK_PTSZ(cuLaunchCooperativeKernel, 9000) HOOK1(cuLaunchCooperativeKernelMultiDevice, 9000)
HOOK_PTSZ(cuGraphLaunch, 10000)
HOOK2_BOTH_PTSZ(cuStreamBeginCapture, 10000, 10010) HOOK_PTSZ(cuStreamBeginCaptureToGraph, 12030) HOOK_PTSZ(cuStreamBeginRecaptureToGraph, 13030)
HOOK_PTSZ(cuStreamEndCapture, 10000)
HOOK2(cuStreamDestroy, 2000, 4000)
HOOK2(cuCtxDestroy, 2000, 4000) HOOK1(cuGreenCtxDestroy, 12040)
HOOK2(cuDevicePrimaryCtxReset, 7000, 11000) HOOK2(cuDevicePrimaryCtxRelease, 7000, 11000)
/* Copies and memsets inside device memory. */
HOOK2_PTDS(cuMemcpyDtoD) HOOK2_PTSZ(cuMemcpyDtoDAsync)
HOOK_PTDS(cuMemcpy, 4000) HOOK_PTDS(cuMemcpyPeer, 4000) HOOK_PTSZ(cuMemcpyAsync, 4000) HOOK_PTSZ(cuMemcpyPeerAsync, 4000)
HOOK2_PTDS(cuMemcpy2D) HOOK2_PTDS(cuMemcpy2DUnaligned) HOOK2_PTDS(cuMemcpy3D) HOOK2_PTSZ(cuMemcpy2DAsync) HOOK2_PTSZ(cuMemcpy3DAsync)
HOOK2_PTDS(cuMemcpyDtoA) HOOK2_PTDS(cuMemcpyAtoD) HOOK2_PTDS(cuMemcpyAtoA)
HOOK2_PTDS(cuMemsetD8) HOOK2_PTDS(cuMemsetD16) HOOK2_PTDS(cuMemsetD32) HOOK2_PTDS(cuMemsetD2D8) HOOK2_PTDS(cuMemsetD2D16) HOOK2_PTDS(cuMemsetD2D32)
HOOK_PTSZ(cuMemsetD8Async, 3020) HOOK_PTSZ(cuMemsetD16Async, 3020) HOOK_PTSZ(cuMemsetD32Async, 3020)
HOOK_PTDS(cuMemcpy3DPeer, 4000) HOOK_PTSZ(cuMemcpy3DPeerAsync, 4000)
HOOK2_BOTH_PTSZ(cuMemcpyBatchAsync, 12080, 13000) HOOK2_BOTH_PTSZ(cuMemcpy3DBatchAsync, 12080, 13000)
HOOK_PTSZ(cuMemcpyWithAttributesAsync, 13020) HOOK_PTSZ(cuMemcpy3DWithAttributesAsync, 13020) HOOK_PTSZ(cuFabricCpyBatchAsync, 13050)
HOOK_PTSZ(cuMemBatchDecompressAsync, 12060)
HOOK_PTSZ(cuMemsetD2D8Async, 3020) HOOK_PTSZ(cuMemsetD2D16Async, 3020) HOOK_PTSZ(cuMemsetD2D32Async, 3020)
#include "memory_hooks.h"
#include "suspend_hooks.h"
#undef PASS
