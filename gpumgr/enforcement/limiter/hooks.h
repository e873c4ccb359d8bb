/* Every hooked function: HOOK(symbol, base name, first CUDA version, variant); see library.h. */
HOOK(cuGetProcAddress, "cuGetProcAddress", 11030, GM_ANY)
HOOK(cuGetProcAddress_v2, "cuGetProcAddress", 12000, GM_ANY)
HOOK(cuGraphLaunch, "cuGraphLaunch", 10000, GM_ANY)
HOOK(cuGraphLaunch_ptsz, "cuGraphLaunch", 10000, GM_PTSZ)
HOOK(cuCtxDestroy, "cuCtxDestroy", 2000, GM_ANY)
HOOK(cuCtxDestroy_v2, "cuCtxDestroy", 4000, GM_ANY)
HOOK(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, GM_ANY)
HOOK(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, GM_ANY)
HOOK(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, GM_ANY)
HOOK(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, GM_ANY)
#include "memory_hooks.h"
