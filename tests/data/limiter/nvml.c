/* A libnvidia-ml.so.1 over the fake GPUs of gpu.h: identities, memory, and the processes with contexts. */
#include "gpu.h"

#define EXPORT __attribute__((visibility("default")))
typedef int R;
typedef unsigned int U;
typedef unsigned long long UL;
typedef void *V;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
static int device_of(V handle) { return (int)(uintptr_t)handle - 1; }

EXPORT R nvmlInit_v2(void) { return gpu_open() ? OK : DRIVER_NOT_LOADED; }
EXPORT R nvmlInitWithFlags(U flags) { (void)flags; return nvmlInit_v2(); }
EXPORT R nvmlShutdown(void) { return OK; }
EXPORT const char *nvmlErrorString(R r) { return r ? "fake error" : "success"; }
EXPORT R nvmlDeviceGetCount_v2(U *n) {
    if (!model) return UNINITIALIZED;
    *n = (U)model->gpus;
    return OK;
}
EXPORT R nvmlDeviceGetHandleByIndex_v2(U i, V *d) {
    if (!model) return UNINITIALIZED;
    *d = (V)(uintptr_t)(i + 1);
    return i < (U)model->gpus ? OK : INVALID;
}
EXPORT R nvmlDeviceGetHandleByUUID(const char *uuid, V *d) {
    for (U i = 0; model && i < (U)model->gpus; i++)
        if (!strcmp(model->gpu[i].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, d);
    return NOT_FOUND;
}
EXPORT R nvmlDeviceGetUUID(V d, char *out, U n) {
    snprintf(out, n, "%s", model->gpu[device_of(d)].uuid);
    return OK;
}
struct v1 { UL total, available, used; };
struct v2 { U version; UL total, reserved, available, used; };
static UL available(V d) {
    gpu_lock();
    gpu_reap();
    UL n = gpu_free_bytes(device_of(d));
    gpu_unlock();
    return n;
}
EXPORT R nvmlDeviceGetMemoryInfo(V d, struct v1 *m) {
    if (!m) return INVALID;
    m->total = model->gpu[device_of(d)].total_bytes, m->available = available(d), m->used = m->total - m->available;
    return OK;
}
EXPORT R nvmlDeviceGetMemoryInfo_v2(V d, struct v2 *m) {
    if (!m || m->version != (2u << 24 | sizeof *m)) return INVALID;
    struct gpu *g = &model->gpu[device_of(d)];
    m->total = g->total_bytes, m->reserved = g->reserved_bytes, m->available = available(d);
    m->used = m->total - m->reserved - m->available;
    return OK;
}
struct record { U pid; UL bytes; U instance, compute; };
static R list(V d, U *n, void *out, size_t size) {
    U room = *n, k = 0;
    gpu_lock();
    gpu_reap();
    for (int i = 0; i < PROCESSES; i++) {
        const struct process *p = &model->process[i];
        struct record r = {(U)p->pid, gpu_process_bytes(p, device_of(d)), ~0u, ~0u};
        if (!p->pid || !r.bytes) continue;
        if (out && k < room) memcpy((char *)out + k * size, &r, size);
        k++;
    }
    gpu_unlock();
    *n = k;
    return k > room ? INSUFFICIENT_SIZE : OK;
}
EXPORT R nvmlDeviceGetComputeRunningProcesses(V d, U *n, void *out) { return list(d, n, out, 16); }
EXPORT R nvmlDeviceGetComputeRunningProcesses_v2(V d, U *n, void *out) { return list(d, n, out, 24); }
EXPORT R nvmlDeviceGetComputeRunningProcesses_v3(V d, U *n, void *out) { return list(d, n, out, 24); }
struct details { U version, mode, n; void *list; };
EXPORT R nvmlDeviceGetRunningProcessDetailList(V d, struct details *x) { return x ? list(d, &x->n, x->list, 32) : INVALID; }
EXPORT R nvmlDeviceGetGraphicsRunningProcesses(V d, U *n, void *out) { return list(d, n, out, 16); }
EXPORT R nvmlDeviceGetGraphicsRunningProcesses_v3(V d, U *n, void *out) { return list(d, n, out, 24); }
