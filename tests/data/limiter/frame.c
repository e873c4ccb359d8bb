/* What memory.c and its neighbours need of a library around them, so that they run alone: symbols and cuGetProcAddress give the
 * wrappers, the pages lie in the folder `pages` of the working folder, and a slot is claimed at the first call. No launch is limited. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "library.h"
#include "memory.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HOOK(symbol, base, version, variant) {#symbol, NULL},
static struct { const char *symbol; void *wrapper; } hooks[] = {
#include "hooks.h"
};
#undef HOOK
static void *(*real_dlsym)(void *, const char *);
static void *find(void *library, const char *name) {
    if (!real_dlsym) {
        void *found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        real_dlsym = (void *(*)(void *, const char *))found;
    }
    return real_dlsym(library, name);
}
void *gm_driver_function(const char *name) {
    static void *libraries[2];
    void **library = &libraries[name[0] == 'n'];
    if (!*library) *library = dlopen(name[0] == 'n' ? "libnvidia-ml.so.1" : "libcuda.so.1", RTLD_NOW);
    return *library ? find(*library, name) : NULL;
}
void *gm_real(enum gm_hook hook) {
    static void *known[GM_HOOKS];
    if (!known[hook]) known[hook] = gm_driver_function(hooks[hook].symbol);
    return known[hook];
}
static void *wrapper(const char *name) {
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)gm_real, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < GM_HOOKS; i++) {
        if (strcmp(name, hooks[i].symbol)) continue;
        if (!hooks[i].wrapper) hooks[i].wrapper = find(self, name);
        return hooks[i].wrapper;
    }
    return NULL;
}
GM_EXPORT void *dlsym(void *library, const char *name) {
    void *found = find(library, name), *own = found && (name[0] == 'c' || name[0] == 'n') ? wrapper(name) : NULL;
    return own ? own : found;
}
static CUresult replace(CUresult r, void **function) {
    for (int i = 0; r == CUDA_SUCCESS && *function && i < GM_HOOKS; i++)
        if (*function == gm_real((enum gm_hook)i)) {
            *function = wrapper(hooks[i].symbol);
            break;
        }
    return r;
}
GM_EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    return replace(CALL(cuGetProcAddress, name, out, version, flags), out);
}
GM_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, void *status) {
    return replace(CALL(cuGetProcAddress_v2, name, out, version, flags, status), out);
}
GM_EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    CUresult r = CALL(cuGraphLaunch, graph, stream);
    if (r == CUDA_SUCCESS) gm_graph_memory();
    return r;
}
GM_EXPORT CUresult cuCtxDestroy_v2(CUcontext c) {
    CUresult r = CALL(cuCtxDestroy_v2, c);
    if (r == CUDA_SUCCESS) gm_memory_context_ended(c);
    return r;
}
GM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) {
    CUresult r = CALL(cuDevicePrimaryCtxRelease_v2, d);
    if (r == CUDA_SUCCESS) gm_memory_primary_changed(d);
    return r;
}
GM_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice d) {
    CUresult r = CALL(cuDevicePrimaryCtxReset_v2, d);
    if (r == CUDA_SUCCESS) gm_memory_primary_changed(d);
    return r;
}

static struct gm_process process;
static int ready, forks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *map(const char *path, size_t size, int writable) {
    int fd = open(path, writable ? O_RDWR | O_CLOEXEC : O_RDONLY | O_CLOEXEC);
    struct stat s;
    void *p = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &s) && (size_t)s.st_size >= size) p = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    return p == MAP_FAILED ? NULL : p;
}
static void in_child(void) {
    ready = 0;
    pthread_mutex_init(&lock, NULL);
}
static void claim(void) {
    for (uint32_t i = 0; i < GM_SLOTS && !process.slot; i++) {
        uint32_t none = 0;
        struct gm_use_slot *s = &process.use->slot[i];
        if (!__atomic_compare_exchange_n(&s->pid, &none, process.pid, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        s->state = GM_ACTIVE;
        process.slot = s, process.slot_index = i;
    }
}
struct gm_process *gm_process(void) {
    if (__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) return &process;
    pthread_mutex_lock(&lock);
    if (!forks++) pthread_atfork(NULL, NULL, in_child);
    if (!ready) {
        process = (struct gm_process){.pid = (uint32_t)getpid(), .slot_index = GM_SLOTS};
        process.limits = map("pages/limits", sizeof *process.limits, 0);
        process.use = map("pages/use", sizeof *process.use, 1);
        if (process.limits && process.use && process.limits->magic == GM_MAGIC) {
            gm_reap_slots();
            claim();
            __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
    return ready ? &process : NULL;
}
/* Empties the slots of dead processes before it frees them; gm_ledger_settle then finds what they held. */
int gm_reap_slots(void) {
    int n = 0;
    for (int i = 0; i < GM_SLOTS; i++) {
        struct gm_use_slot *s = &process.use->slot[i];
        uint32_t pid = __atomic_load_n(&s->pid, __ATOMIC_SEQ_CST);
        if (!pid || pid == process.pid || !kill((int)pid, 0) || errno != ESRCH) continue;
        memset(s->gpu, 0, sizeof s->gpu);
        n += __atomic_compare_exchange_n(&s->pid, &pid, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    return n;
}
int gm_gpu_of_device(CUdevice device) {
    uint8_t uuid[16];
    CUresult (*ask)(void *, CUdevice) = (CUresult(*)(void *, CUdevice))gm_driver_function("cuDeviceGetUuid_v2");
    if (!gm_process() || !ask || ask(uuid, device)) return -1;
    for (uint32_t i = 0; i < process.limits->gpus; i++)
        if (!memcmp(uuid, process.limits->gpu[i].uuid, 16)) return (int)i;
    return -1;
}
CUdevice gm_current_device(void) {
    CUdevice d;
    CUresult (*ask)(CUdevice *) = (CUresult(*)(CUdevice *))gm_driver_function("cuCtxGetDevice");
    return ask && ask(&d) == CUDA_SUCCESS ? d : -1;
}
void gm_unrelax(int mode) {
    CUresult (*exchange)(int *) = (CUresult(*)(int *))gm_driver_function("cuThreadExchangeStreamCaptureMode");
    if (exchange) exchange(&mode);
}
int gm_relax(void) {
    int mode = 2;
    CUresult (*exchange)(int *) = (CUresult(*)(int *))gm_driver_function("cuThreadExchangeStreamCaptureMode");
    if (exchange) exchange(&mode);
    return mode;
}
