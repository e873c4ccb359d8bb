/* Decides which look-ups of functions get a hook. A program looks functions up by dlsym (dlsym.S), by cuGetProcAddress, or by linking (the
 * symbols themselves). */
#define _GNU_SOURCE
#include "library.h"
#include "old_glibc.h"
#include <dlfcn.h>
#include <string.h>

#define PASS(symbol, base, version, variant) extern void gm_stub_##symbol(void) __asm__(#symbol);
#define HOOK(symbol, base, version, variant) PASS(symbol, base, version, variant) extern void gm_w_##symbol(void);
#include "hooks.h"
#undef HOOK

/* stubs.S depends on this layout. */
struct hook {
    void *wrapper;        /* NULL: the stub jumps to the driver */
    _Atomic(void *) real; /* the driver's function; NULL: not looked up yet */
    void *stub;
    const char *symbol, *base;
    int version, variant;
};
__attribute__((visibility("hidden"))) struct hook gm_hooks[] = {
#define PASS(symbol, base, version, variant) {NULL, NULL, (void *)gm_stub_##symbol, #symbol, base, version, variant},
#define HOOK(symbol, base, version, variant) {(void *)gm_w_##symbol, NULL, (void *)gm_stub_##symbol, #symbol, base, version, variant},
#include "hooks.h"
#undef HOOK
};
_Static_assert(sizeof(struct hook) == 48, "stubs.S");
#define hooks gm_hooks

typedef void *(*dlsym_t)(void *, const char *);
__attribute__((visibility("hidden"))) dlsym_t gm_real_dlsym;
__attribute__((visibility("hidden"))) void *gm_dlsym_pick(void *handle, const char *name, void *caller);

/* A sanitizer's runtime calls these functions while it starts, before its checks work. */
#define EARLY __attribute__((no_sanitize("address"), no_sanitize("thread"), no_sanitize("undefined")))

EARLY static dlsym_t real_dlsym(void) {
    dlsym_t found = __atomic_load_n(&gm_real_dlsym, __ATOMIC_ACQUIRE);
    if (found) return found;
    static const char *const versions[] = {"GLIBC_2.34", GM_FIRST};
    for (int i = 0; i < 2 && !found; i++) found = (dlsym_t)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    __atomic_store_n(&gm_real_dlsym, found, __ATOMIC_RELEASE);
    return found;
}

/* The handle of libcuda or libnvidia-ml; NULL until the program has loaded it. The handle is never closed: the driver's library must not be
 * unloaded while the hooks have addresses of its functions. */
static void *driver(bool nvml) {
    static _Atomic(void *) handles[2];
    void *handle = atomic_load(&handles[nvml]);
    if (handle) return handle;
    handle = dlopen(nvml ? "libnvidia-ml.so.1" : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (handle) atomic_store(&handles[nvml], handle);
    return handle;
}

void *gm_driver_function(const char *symbol) {
    void *handle = driver(symbol[0] == 'n');
    return handle ? real_dlsym()(handle, symbol) : NULL;
}

static CUresult not_found(void) { return CUDA_ERROR_NOT_FOUND; }
void *gm_real(enum gm_hook hook) {
    const char *symbol = hooks[hook].symbol;
    void *real = atomic_load_explicit(&hooks[hook].real, memory_order_relaxed);
    if (!real && driver(symbol[0] == 'n')) {
        real = gm_driver_function(symbol);
        if (!real || real == hooks[hook].stub) real = (void *)not_found; /* the driver lacks it, so the look-up found our stub */
        atomic_store_explicit(&hooks[hook].real, real, memory_order_relaxed);
    }
    return real == (void *)not_found ? NULL : real;
}
/* The target of a stub that could not jump at once. Waits while the container is suspended. */
__attribute__((visibility("hidden"))) void *gm_hook_target(int hook);
void *gm_hook_target(int hook) {
    gm_await_resume();
    void *real = hooks[hook].wrapper ? hooks[hook].wrapper : gm_real((enum gm_hook)hook);
    return real ? real : (void *)not_found;
}

/* The driver's own libraries get the driver's functions: a wrapper between them would count twice or recurse. */
static bool of_the_driver(void *caller) {
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return false;
    const char *slash = strrchr(info.dli_fname, '/'), *name = slash ? slash + 1 : info.dli_fname;
    return !strncmp(name, "libcuda.so", 10) || !strncmp(name, "libnvidia-", 10) || !strncmp(name, "libcudadebugger", 15);
}

#define NOTHING ((void *)1) /* dlsym.S */
static void *pick(dlsym_t real, void *handle, const char *name, void *caller) {
    for (int i = 0; i < GM_HOOKS; i++) {
        if (strcmp(name, hooks[i].symbol)) continue;
        void *of_driver = gm_real(i);
        bool anywhere = handle == RTLD_NEXT || handle == RTLD_DEFAULT; /* there the C library may find the stub */
        if (!of_driver && anywhere && real(RTLD_DEFAULT, name) == hooks[i].stub)
            return real(RTLD_NEXT, name) ?: NOTHING; /* with an error for dlerror */
        if (!of_driver) return NULL;
        if (of_the_driver(caller)) return anywhere ? of_driver : NULL;
        return anywhere || real(handle, name) == of_driver ? hooks[i].stub : NULL;
    }
    return NULL;
}
/* What dlsym returns: a stub, or for the driver's own libraries the driver's function. NULL: the C library decides. NOTHING: dlsym returns
 * NULL, since there is no driver, or the driver lacks the function. */
EARLY void *gm_dlsym_pick(void *handle, const char *name, void *caller) {
    dlsym_t real = real_dlsym();
    bool drivers = name && ((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v'));
    return drivers ? pick(real, handle, name, caller) : NULL;
}

static void *wrapper_of(const char *name, void *found, int version, unsigned long long flags) {
    int best = -1, per_thread = flags & 2 ? GM_PTSZ : GM_ANY;
    for (int i = 0; i < GM_HOOKS; i++) {
        if (hooks[i].version && gm_real(i) == found) return hooks[i].stub;
        if (strcmp(name, hooks[i].base) || hooks[i].version > version || !hooks[i].version) continue;
        bool better = best < 0 || (hooks[i].variant == per_thread && hooks[best].variant != per_thread) ||
                      (hooks[i].variant == hooks[best].variant && hooks[i].version > hooks[best].version);
        if (better && (hooks[i].variant == GM_ANY || per_thread == GM_PTSZ)) best = i;
    }
    /* Some drivers return the same addresses as dlsym. There an address that no hook has is an unknown version of the function. With other
     * drivers the table of hooks decides. */
    static atomic_int answers_symbols; /* 0: not known, 1: yes, 2: no */
    if (best >= 0 && !atomic_load(&answers_symbols)) {
        void *probe = NULL;
        int (*ask)(const char *, void **, int, unsigned long long, void *) = gm_real(GM_HOOK_cuGetProcAddress_v2);
        if (ask) ask("cuDriverGetVersion", &probe, 12000, 0, NULL);
        atomic_store(&answers_symbols, !ask || (probe && probe == gm_driver_function("cuDriverGetVersion")) ? 1 : 2);
    }
    if (best < 0 || atomic_load(&answers_symbols) == 1) {
        struct gm_process *p = best < 0 || !hooks[best].wrapper ? NULL : gm_process();
        if (p && p->slot) __atomic_fetch_add(&p->slot->gpu[0].unknown, 1, __ATOMIC_RELAXED);
        return found;
    }
    atomic_store(&hooks[best].real, found);
    return hooks[best].stub;
}

GM_WRAPPER(cuGetProcAddress_v2, (const char *name, void **function, int version, unsigned long long flags, void *status)) {
    CUresult r = CALL(cuGetProcAddress_v2, name, function, version, flags, status);
    if (r == CUDA_SUCCESS && name && function && *function) *function = wrapper_of(name, *function, version, flags);
    return r;
}

GM_WRAPPER(cuGetProcAddress, (const char *name, void **function, int version, unsigned long long flags)) {
    CUresult r = CALL(cuGetProcAddress, name, function, version, flags);
    if (r == CUDA_SUCCESS && name && function && *function) *function = wrapper_of(name, *function, version, flags);
    return r;
}
