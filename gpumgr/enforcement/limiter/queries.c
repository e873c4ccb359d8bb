/* Wrappers of the queries of CUDA and NVML that report memory: they show the container's limit and its use. Programs measure their own use
 * by the free memory. So the free memory depends on this container only: a release by another container does not raise it. */
#include "memory.h"
#include <stdio.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef void *nvmlDevice;
enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_INSUFFICIENT_SIZE = 7 };

/* The total and used bytes that a program sees of a GPU of `total` bytes; false: its memory is not limited. */
static bool share(int gpu, uint64_t *total, uint64_t *used) {
    uint64_t limit = gm_memory_limit(gpu);
    if (!limit) return false;
    if (!gm_suspended()) gm_memory_settle(false), gm_graph_memory(); /* calls of CUDA would block in a suspended container */
    gm_ledger_settle(gpu); /* drops the bytes of dead processes, once the agent or a reservation has freed their slots */
    *used = gm_memory_used(gpu);
    if (limit < *total) *total = limit;
    if (*used > *total) *used = *total;
    return true;
}

GM_WRAPPER(cuMemGetInfo_v2, (size_t *available, size_t *total)) {
    CUresult r = CALL(cuMemGetInfo_v2, available, total);
    uint64_t all = r == CUDA_SUCCESS ? *total : 0, used;
    if (r != CUDA_SUCCESS || !share(gm_current_gpu(), &all, &used)) return r;
    *total = all;
    *available = all - used;
    return r;
}
static uint narrow(uint64_t n) { return n > UINT32_MAX ? UINT32_MAX : (uint)n; }
GM_WRAPPER(cuMemGetInfo, (uint *available, uint *total)) {
    CUresult r = CALL(cuMemGetInfo, available, total);
    uint64_t all = UINT64_MAX, used;
    if (r != CUDA_SUCCESS || !share(gm_current_gpu(), &all, &used)) return r;
    *total = narrow(all);
    *available = narrow(all - used);
    return r;
}
GM_WRAPPER(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice d)) {
    CUresult r = CALL(cuDeviceTotalMem_v2, bytes, d);
    uint64_t limit = r == CUDA_SUCCESS && gm_process() ? gm_memory_limit(gm_gpu_of_device(d)) : 0;
    if (limit && limit < *bytes) *bytes = limit;
    return r;
}
GM_WRAPPER(cuDeviceTotalMem, (uint *bytes, CUdevice d)) {
    CUresult r = CALL(cuDeviceTotalMem, bytes, d);
    uint64_t limit = r == CUDA_SUCCESS && gm_process() ? gm_memory_limit(gm_gpu_of_device(d)) : 0;
    if (limit && limit < *bytes) *bytes = (uint)limit;
    return r;
}

/* The index of NVML's device in the pages, by its UUID: `GPU-` or `MIG-` and 32 digits with dashes. */
static int gpu_of_nvml(nvmlDevice device) {
    struct gm_process *p = gm_process();
    char text[96] = "";
    uint8_t uuid[16] = {0};
    if (!p || ASK(nvmlDeviceGetUUID, (nvmlDevice, char *, uint), device, text, sizeof text) != NVML_SUCCESS || strlen(text) < 40) return -1;
    int n = 0;
    for (const char *c = text + 4; n < 16 && c[0] && c[1]; c += 2) {
        uint byte;
        if (*c == '-') c++;
        if (sscanf(c, "%2x", &byte) != 1) return -1;
        uuid[n++] = (uint8_t)byte;
    }
    for (uint32_t i = 0; n == 16 && i < p->limits->gpus && i < GM_GPUS; i++)
        if (!memcmp(p->limits->gpu[i].uuid, uuid, 16)) return (int)i;
    return -1;
}
struct memory_v1 { ull total, available, used; };
struct memory_v2 { uint version; ull total, reserved, available, used; };
GM_WRAPPER(nvmlDeviceGetMemoryInfo, (nvmlDevice device, struct memory_v1 *m)) {
    int r = CALL(nvmlDeviceGetMemoryInfo, device, m);
    uint64_t total = r == NVML_SUCCESS ? m->total : 0, used;
    if (r != NVML_SUCCESS || !share(gpu_of_nvml(device), &total, &used)) return r;
    *m = (struct memory_v1){total, total - used, used};
    return r;
}
GM_WRAPPER(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice device, struct memory_v2 *m)) {
    int r = CALL(nvmlDeviceGetMemoryInfo_v2, device, m);
    uint64_t total = r == NVML_SUCCESS ? m->total : 0, used;
    if (r != NVML_SUCCESS || !share(gpu_of_nvml(device), &total, &used)) return r;
    *m = (struct memory_v2){m->version, total, 0, total - used, used};
    return r;
}

/* Lists of processes show only the container's own, by their pids in the container. */
struct process_v1 { uint pid; ull bytes; };
struct process_v2 { uint pid; ull bytes; uint instance, compute_instance; };
struct process_detail { uint pid; ull bytes; uint instance, compute_instance; ull protected_bytes; };
/* Fills records of `size` bytes, or none where the list would show processes of other containers; returns NVML's code. */
static int processes(int gpu, bool compute, uint *count, void *out, size_t size) {
    struct gm_process *p = gm_process();
    uint room = *count, n = 0;
    for (int i = 0; compute && i < gm_slots(); i++) {
        const struct gm_use_slot *s = &p->use->slot[i];
        uint64_t bytes = 0;
        uint pid = __atomic_load_n(&s->pid, __ATOMIC_RELAXED);
        for (int kind = 0; pid && kind < GM_KINDS; kind++) bytes += __atomic_load_n(&s->gpu[gpu].bytes[kind], __ATOMIC_RELAXED);
        if (!bytes) continue;
        struct process_detail one = {pid, bytes, UINT32_MAX, UINT32_MAX, 0};
        if (out && n < room) memcpy((char *)out + n * size, &one, size);
        n++;
    }
    *count = n;
    return n > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
#define LIST(symbol, record, compute)                                                                                              \
    GM_WRAPPER(symbol, (nvmlDevice device, uint *count, record *out)) {                                                            \
        int gpu = count ? gpu_of_nvml(device) : -1;                                                                                \
        return gm_memory_limit(gpu) ? processes(gpu, compute, count, out, sizeof(record)) : CALL(symbol, device, count, out);      \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, struct process_v1, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, struct process_v2, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, struct process_v2, true)
LIST(nvmlDeviceGetGraphicsRunningProcesses, struct process_v1, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, struct process_v2, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, struct process_v2, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, struct process_v1, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct process_v2, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct process_v2, false)
struct details { uint version, mode, n; struct process_detail *list; }; /* mode 0: compute */
GM_WRAPPER(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice device, struct details *d)) {
    int gpu = d ? gpu_of_nvml(device) : -1;
    return gm_memory_limit(gpu) ? processes(gpu, !d->mode, &d->n, d->list, sizeof *d->list) : CALL(nvmlDeviceGetRunningProcessDetailList, device, d);
}
