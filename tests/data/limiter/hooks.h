/* The hooks of memory.c and queries.c, and those that frame.c has for their sake. */
#include "memory_hooks.h"
HOOK(cuCtxDestroy_v2, "cuCtxDestroy", 4000, GM_ANY)
HOOK(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, GM_ANY)
HOOK(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, GM_ANY)
HOOK(cuGraphLaunch, "cuGraphLaunch", 10000, GM_ANY)
HOOK(cuGetProcAddress, "cuGetProcAddress", 11030, GM_ANY)
HOOK(cuGetProcAddress_v2, "cuGetProcAddress", 12000, GM_ANY)
