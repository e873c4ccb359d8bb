/* A CUDA program that reads commands, a line each, and answers each with one line: a CUresult and numbers. usage: tenant LOOKUP, where
 * LOOKUP says how it finds the driver's functions: dlsym, proc (cuGetProcAddress of CUDA 13), stream (also for per-thread streams).
 *   init DEVICE                 cuInit and the primary context
 *   info | total | nvml         what the driver says about memory: free and total bytes
 *   grab KIND STEP MOST         allocates STEP bytes at a time until a refusal; the granted bytes
 *   free                        frees what grab took
 *   keep N                      frees all but each Nth
 *   shapes W H D FORMAT CHANNELS FLAGS LEVELS N   N arrays, or mipmapped ones with more than one level
 *   threads N COUNT             each allocates and frees COUNT times, up to 1 MiB; some stay; how many requests failed
 *   graph STEP WHEN DEVICE      a graph with an allocation of a device gets its memory at instantiation, upload or launch (capture: also at
 *                               launch, after the allocation was captured; node, node2, node3: after a version of cuGraphAddNode); the
 *                               bytes that the current device used before that
 *   second STEP                 a context of its own takes STEP bytes and ends; the bytes used before its end
 *   random SEED COUNT LIMIT     operations of all kinds against a model; the first one that differs, or COUNT
 *   fork KIND STEP MOST         grab by a child, which ends
 *   reset                       cuDevicePrimaryCtxReset
 *   trim                        cuDeviceGraphMemTrim
 *   capture                     allocations while another thread captures in global mode; the results
 *   work WHAT MILLISECONDS N [THREADS]   one of `jobs` (sparse sleeps 5 ms after each kernel, halt stops itself, dies kills itself, giant begins with a kernel of ten seconds that is not counted), as soon as N threads of all tenants work; the kernels' GPU time in ns, and the time
 *   crowd N                     N children that use CUDA and stay, without a context; how many had an answer
 *   close                       dlclose of the driver
 *   exec                        the program anew
 *   sleep                       another program, which does not use CUDA; no answer
 *   leave                       the first thread ends, another one stays; no answer
 *   child                       a child by fork that launches and ends; its status
 *   latency BURSTS              launches of kernels that take no time, in bursts within a turn; ns of each: p50 and p99
 *   calls                       how many calls of the driver this thread has made
 *   own                         the same of the last `latency`, without the time in the driver's function
 *   orphan STEP                 a pool is destroyed, then its allocation of STEP bytes freed; the bytes used before and after
 *   late STEP N OWN             cuMemFreeAsync of N times STEP behind a kernel, in a stream of its own or the default one; the result of a
 *                               request that needs a part of them before the kernel has ended, and the bytes used afterwards
 *   idles STEP                  STEP bytes are freed by cuMemFreeAsync behind a kernel, which has ended
 *   cut STEP                    the same by a thread that is cancelled within cuMemFreeAsync; then STEP is allocated and freed once more
 *   ends STEP N                 N times STEP is freed behind a kernel, and STEP behind a longer one in the same stream, which then ends; the result
 *                               of a request that needs it before the longer kernel has ended, and the bytes used afterwards
 *   step NAME PID TIMEOUT       a step of a checkpoint of another process: lock (TIMEOUT in ms; 0: none), checkpoint, restore, unlock, state; its state
 *   suspend PID AFTER FOR N PAGES   what the agent does with a container of one process after AFTER ms, when N threads work, until FOR ms
 *                               later (0: until it asks); whether it asked, and its state while it was suspended
 *   events N                    launches while N records of events fail; how many events there are
 *   exchanges NS                from now on a change of the thread's mode for captures takes so long
 *   retains N [OWN]             launches between a retain and a release of the primary context; with OWN into another context, and each
 *                               release is the last one; how many events there are
 *   captured HOW PTSZ           launches into a stream that is captured into a graph of its own (new), a given one (given), or again; whether it was a given one
 *   pools STEP                  STEP bytes from the pool in two threads, where one hears of the pool's growth late
 *   cancels N [FULL]            threads that are cancelled, one after the other, while they launch; how many were within a launch. FULL: no
 *                               marker can be recorded, so the driver's queue is full and its launches wait
 *   passing N                   threads that launch and end, one after the other; how many events there are
 *   forks N                     N of them, while four threads launch
 *   reduce NUMBER FIRST MILLISECONDS N [TOGETHER]   rounds of a collective over GPUs 0 and 1, launched on GPU FIRST first, or by one call;
 *                               how many
 *   captures MILLISECONDS       launches in one thread, captures in global mode in another; how many captures */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "clock.h"
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int R;
typedef uint64_t P;
typedef void *V;
typedef long long N;
#define MIB (1024LL * 1024)
struct property { int type, handles, location, id; V security; unsigned char rest[8]; };
struct array { size_t width, height; int format; unsigned channels; };
struct array3 { size_t width, height, depth; int format; unsigned channels, flags; };
struct pool_property { int type, handles, location, id; V security; size_t most; unsigned char rest[56]; };
struct node { struct pool_property pool; V access; size_t accesses, bytes; P at; };
#define FUNCTIONS(X) \
    X(cuInit, "", (unsigned)) X(cuDevicePrimaryCtxRetain, "", (V *, int)) X(cuCtxSetCurrent, "", (V)) X(cuMemGetInfo, "_v2", (size_t *, size_t *)) \
    X(cuDeviceTotalMem, "_v2", (size_t *, int)) X(cuMemAlloc, "_v2", (P *, size_t)) X(cuMemFree, "_v2", (P)) \
    X(cuMemAllocManaged, "", (P *, size_t, unsigned)) X(cuMemAllocPitch, "_v2", (P *, size_t *, size_t, size_t, unsigned)) \
    X(cuArrayCreate, "_v2", (P *, const struct array *)) X(cuArrayDestroy, "", (P)) X(cuMemCreate, "", (P *, size_t, const struct property *, P)) \
    X(cuMemRelease, "", (P)) X(cuMemAddressReserve, "", (P *, size_t, size_t, P, P)) X(cuMemMap, "", (P, size_t, size_t, P, P)) \
    X(cuMemUnmap, "", (P, size_t)) X(cuMemAllocAsync, "", (P *, size_t, V)) X(cuMemFreeAsync, "", (P, V)) \
    X(cuDeviceGetDefaultMemPool, "", (V *, int)) X(cuMemPoolGetAttribute, "", (V, int, V)) X(cuDevicePrimaryCtxReset, "_v2", (int)) \
    X(cuModuleLoadData, "", (V *, const char *)) X(cuModuleGetFunction, "", (V *, V, const char *)) X(cuCtxSynchronize, "", (void)) \
    X(cuLaunchKernel, "", (V, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, V, V *, V *)) \
    X(cuArray3DCreate, "_v2", (P *, const struct array3 *)) X(cuMipmappedArrayCreate, "", (P *, const struct array3 *, unsigned)) \
    X(cuMipmappedArrayDestroy, "", (P)) X(cuMemPoolCreate, "", (V *, const struct pool_property *)) X(cuMemPoolDestroy, "", (V)) \
    X(cuMemAllocFromPoolAsync, "", (P *, size_t, V, V)) X(cuCtxCreate, "_v4", (V *, V, unsigned, int)) X(cuCtxDestroy, "_v2", (V)) \
    X(cuGraphCreate, "", (V *, unsigned)) X(cuGraphAddMemAllocNode, "", (V *, V, V, size_t, struct node *)) X(cuDeviceGraphMemTrim, "", (int)) \
    X(cuStreamCreate, "", (V *, unsigned)) X(cuStreamBeginCapture, "_v2", (V, int)) X(cuStreamEndCapture, "", (V, V *)) \
    X(cuGraphInstantiateWithFlags, "", (V *, V, P)) X(cuGraphInstantiateWithParams, "", (V *, V, V)) X(cuGraphUpload, "", (V, V)) X(cuGraphLaunch, "", (V, V)) X(cuStreamSynchronize, "", (V)) \
    X(cuLaunchKernelEx, "", (const void *, V, V *, V *)) X(cuMemcpyDtoDAsync, "_v2", (P, P, size_t, V)) X(cuMemsetD8Async, "", (P, unsigned char, size_t, V)) \
    X(cuLaunchCooperativeKernel, "", (V, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, V, V *)) \
    X(cuCheckpointProcessLock, "", (int, const P *)) X(cuCheckpointProcessCheckpoint, "", (int, const P *)) X(cuCheckpointProcessRestore, "", (int, const P *)) \
    X(cuCheckpointProcessUnlock, "", (int, const P *)) X(cuCheckpointProcessGetState, "", (int, int *)) \
    X(cuLaunchCooperativeKernelMultiDevice, "", (void *, unsigned, unsigned)) X(cuGraphExecDestroy, "", (V))
#define DECLARE(name, suffix, arguments) static R(*name) arguments;
FUNCTIONS(DECLARE)
static V library;
#define FOUND(name, arguments) ((R(*) arguments)dlsym(library, #name))
static int load(const char *how) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    R (*ask)(const char *, V *, int, uint64_t, int *) = library ? (R(*)(const char *, V *, int, uint64_t, int *))dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (!ask) return 0;
#define FIND(name, suffix, arguments) \
    if (!strcmp(how, "dlsym")) name = (R(*) arguments)dlsym(library, #name suffix); \
    else if (ask(#name, (V *)&name, 13000, !strcmp(how, "stream") ? 2 : 0, NULL)) return 0; \
    if (!name) return 0;
    FUNCTIONS(FIND)
    return 1;
}

enum kind { ALLOC, MANAGED, PITCH, ARRAY, VMM, ASYNC, KINDS, POOL = KINDS, MIPMAP, ALL_KINDS }; /* `random` takes those before KINDS */
static const char *const names[ALL_KINDS] = {"alloc", "managed", "pitch", "array", "vmm", "async", "pool", "mipmap"};
static V own_pool;
static struct { P at, address; enum kind kind; N bytes; } held[65536];
static int count;
static R take(enum kind kind, N n) {
    P at = 0, address = 0;
    R r = 1;
    size_t pitch;
    struct property property = {.type = 1, .location = 1};
    struct array array = {(size_t)(n / 4 / 64), 64, 0x20, 1};
    switch (kind) {
    case ALLOC: r = cuMemAlloc(&at, (size_t)n); break;
    case MANAGED: r = cuMemAllocManaged(&at, (size_t)n, 1); break;
    case PITCH: r = cuMemAllocPitch(&at, &pitch, 1000, (size_t)(n / 1024), 4); break;
    case ARRAY: r = cuArrayCreate(&at, &array); break;
    case VMM:
        r = cuMemCreate(&at, (size_t)n, &property, 0);
        if (r) break;
        cuMemAddressReserve(&address, (size_t)n, 0, 0, 0);
        r = cuMemMap(address, (size_t)n, 0, at, 0) || cuMemRelease(at); /* the mapping alone keeps it, as PyTorch's segments */
        break;
    case ASYNC: r = cuMemAllocAsync(&at, (size_t)n, NULL); break;
    case POOL:
        r = own_pool ? 0 : cuMemPoolCreate(&own_pool, &(struct pool_property){.type = 1, .location = 1});
        if (!r) r = cuMemAllocFromPoolAsync(&at, (size_t)n, own_pool, NULL);
        break;
    default: break;
    }
    if (r) return r;
    held[count].at = at, held[count].address = address, held[count].kind = kind, held[count++].bytes = n;
    return 0;
}
static R drop(int i) {
    P at = held[i].at, address = held[i].address;
    enum kind kind = held[i].kind;
    N n = held[i].bytes;
    held[i] = held[--count];
    return kind == ARRAY ? cuArrayDestroy(at) : kind == VMM ? cuMemUnmap(address, (size_t)n) : kind == MIPMAP ? cuMipmappedArrayDestroy(at) :
           kind == ASYNC || kind == POOL ? cuMemFreeAsync(at, NULL) : cuMemFree(at);
}
static int kind_of(const char *name) {
    int k = 0;
    while (k < ALL_KINDS && strcmp(name, names[k])) k++;
    return k;
}
static R grab(const char *name, N step, N most, N *granted) {
    R r = 0;
    for (*granted = 0; *granted < most && !(r = take((enum kind)kind_of(name), step)); *granted += step) {}
    return r;
}

/* The model: what is held, with the pool's reserved bytes; a request that does not fit makes the pool give back what it does not use. */
static N pool_value(int attribute) {
    V pool;
    uint64_t value;
    cuDeviceGetDefaultMemPool(&pool, 0);
    cuMemPoolGetAttribute(pool, attribute, &value);
    return (N)value;
}
static int operations(unsigned seed, int number, N limit) {
    size_t free_bytes, total;
    cuMemGetInfo(&free_bytes, &total);
    N used = (N)(total - free_bytes) - pool_value(5);
    for (int i = 0; i < number; i++) {
        if (count && (rand_r(&seed) % 100 < 45 || count > 2000)) {
            int k = rand_r(&seed) % count;
            used -= held[k].kind == ASYNC ? 0 : held[k].bytes;
            if (drop(k)) return i;
        } else {
            enum kind kind = (enum kind)(rand_r(&seed) % KINDS);
            N n = (1 + rand_r(&seed) % 24) * 2 * MIB, need = kind == ASYNC ? (n + 32 * MIB - 1) / (32 * MIB) * 32 * MIB : n;
            if (kind == ALLOC || kind == MANAGED) n -= rand_r(&seed) % 4096; /* the driver takes whole blocks */
            N least = (pool_value(7) + 32 * MIB - 1) / (32 * MIB) * 32 * MIB, reserved = pool_value(5);
            int fits = used + reserved + need <= limit || used + (reserved > least ? least : reserved) + need <= limit;
            R r = take(kind, n);
            if (r != (fits ? 0 : 2)) return i;
            if (!r && kind != ASYNC) used += held[count - 1].bytes = need;
        }
        cuMemGetInfo(&free_bytes, &total);
        if ((N)total != limit || (N)free_bytes != limit - used - pool_value(5)) return i;
    }
    return number;
}

/* N arrays; returns how many were made. */
static int shapes(const char *line, R *r) {
    struct array3 a;
    unsigned levels = 1;
    int most = 0, n = 0;
    sscanf(line, "%*s %zu %zu %zu %d %u %u %u %d", &a.width, &a.height, &a.depth, &a.format, &a.channels, &a.flags, &levels, &most);
    for (*r = 0; n < most; n++) {
        P at;
        *r = levels > 1 ? cuMipmappedArrayCreate(&at, &a, levels) : cuArray3DCreate(&at, &a);
        if (*r) break;
        held[count].at = at, held[count++].kind = levels > 1 ? MIPMAP : ARRAY;
    }
    return n;
}
static V context;
static R graph(N step, const char *when, int device, N *used) {
    V graph, node, exec, other, stream = NULL;
    P at;
    size_t n = 0, total = 0;
    struct node allocation = {.pool = {.type = 1, .location = 1, .id = device}, .bytes = (size_t)step};
    struct { uint64_t flags; V stream, node; int result; } with_upload = {.flags = 2};
    R r = cuGraphCreate(&graph, 0);
    if (!strcmp(when, "capture")) {
        r = cuDevicePrimaryCtxRetain(&other, device) || cuCtxSetCurrent(other) || cuStreamCreate(&stream, 1) || cuStreamBeginCapture(stream, 0);
        if (!r) r = cuMemAllocAsync(&at, (size_t)step, stream) || cuStreamEndCapture(stream, &graph) || cuCtxSetCurrent(context);
    } else if (!strncmp(when, "node", 4)) {
        struct { int type, reserved[3]; struct node allocation; V rest[16]; } any = {.type = 10, .allocation = allocation};
        R (*newer)(V *, V, V, V, size_t, V) = when[4] == '2' ? FOUND(cuGraphAddNode_v2, (V *, V, V, V, size_t, V)) : FOUND(cuGraphAddNode_v3, (V *, V, V, V, size_t, V));
        r = r || (when[4] ? newer(&node, graph, NULL, NULL, 0, &any) : FOUND(cuGraphAddNode, (V *, V, V, size_t, V))(&node, graph, NULL, 0, &any));
    } else if (!r) r = cuGraphAddMemAllocNode(&node, graph, NULL, 0, &allocation);
    if (!r) r = cuGraphInstantiateWithFlags(&exec, graph, 0) || cuMemGetInfo(&n, &total);
    *used = (N)(total - n);
    if (r) return r;
    if (!strcmp(when, "instantiation")) return cuGraphInstantiateWithParams(&exec, graph, &with_upload);
    return !strcmp(when, "upload") ? cuGraphUpload(exec, stream) : cuGraphLaunch(exec, stream);
}
static R second(N step, N *used) {
    V own;
    P at;
    size_t n = 0, total = 0;
    R r = cuCtxCreate(&own, NULL, 0, 0);
    if (!r) r = cuMemAlloc(&at, (size_t)step) || cuMemAlloc(&at, 1000) ? 1 : cuMemGetInfo(&n, &total);
    *used = (N)(total - n);
    return r ? r : cuCtxDestroy(own);
}

static R orphan(N step, N *before, N *after) {
    V pool;
    P at;
    size_t n, total;
    R r = cuMemPoolCreate(&pool, &(struct pool_property){.type = 1, .location = 1});
    if (!r) r = cuMemAllocFromPoolAsync(&at, (size_t)step, pool, NULL);
    if (!r) r = cuMemPoolDestroy(pool) || cuMemGetInfo(&n, &total);
    *before = (N)(total - n);
    if (!r) r = cuMemFreeAsync(at, NULL) || cuMemGetInfo(&n, &total);
    *after = (N)(total - n);
    return r;
}
static V launched(const char *kernel) {
    static V module;
    V function;
    return (module || !cuModuleLoadData(&module, "")) && !cuModuleGetFunction(&function, module, kernel) ? function : NULL;
}
static N now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int own_threads(void) {
    int n = -2; /* . and .. */
    DIR *tasks = opendir("/proc/self/task");
    while (tasks && readdir(tasks)) n++;
    if (tasks) closedir(tasks);
    return n - !!getenv("TSAN_OPTIONS"); /* ThreadSanitizer's own thread */
}
/* PyTorch on an H200: a product of 4096 takes 210 us, a small kernel less than its launch, a graph has 50 products of 2048. */
enum way { KERNEL, GRAPH, EXTENDED, COOPERATIVE, SEVERAL, COPY, FILL, ANY, PEER, FLAT, BOX, BOX_PEER, BATCH, BATCH_V1, OFFLOAD, TO_ARRAY, FROM_ARRAY, ARRAYS, BOXES, BOXES_V1, HALVES, ROWS, WORDS, GRID, ATTRIBUTED, ATTRIBUTED_BOX, FABRIC, DECOMPRESSED };
static const struct job { const char *what, *kernel; N each; int batch, nodes; enum way way; } jobs[] = {
    {"products", "work_210000", 210000, 20, 1, KERNEL}, {"small", "work_2500", 2500, 200, 1, KERNEL}, {"graph", "work_30000", 30000, 1, 50, GRAPH},
    {"long", "work_50000000", 50000000, 1, 1, KERNEL}, {"extended", "work_210000", 210000, 20, 1, EXTENDED},
    {"cooperative", "work_210000", 210000, 20, 1, COOPERATIVE}, {"several", "work_210000", 210000, 20, 1, SEVERAL},
    {"unified", "work", 201000, 20, 1, ANY}, {"peers", "work", 201000, 20, 1, PEER}, {"rectangles", "work", 201000, 20, 1, FLAT},
    {"boxes", "work", 201000, 20, 1, BOX}, {"boxpeers", "work", 201000, 20, 1, BOX_PEER}, {"batches", "work", 201000, 20, 1, BATCH},
    {"toarrays", "work", 201000, 20, 1, TO_ARRAY}, {"fromarrays", "work", 201000, 20, 1, FROM_ARRAY}, {"arrays", "work", 201000, 20, 1, ARRAYS},
    {"offloads", "work", 1000, 20, 1, OFFLOAD}, {"oldbatches", "work", 201000, 20, 1, BATCH_V1}, {"boxbatches", "work", 201000, 20, 1, BOXES}, {"oldboxbatches", "work", 201000, 20, 1, BOXES_V1},
    {"attributed", "work", 201000, 20, 1, ATTRIBUTED}, {"attributedboxes", "work", 201000, 20, 1, ATTRIBUTED_BOX}, {"fabric", "work", 201000, 20, 1, FABRIC},
    {"decompressed", "work", 201000, 20, 1, DECOMPRESSED}, {"halves", "work", 201000, 20, 1, HALVES}, {"rows", "work", 201000, 20, 1, ROWS},
    {"words", "work", 201000, 20, 1, WORDS}, {"grid", "work_210000", 210000, 20, 1, GRID}, {"copies", "work", 201000, 20, 1, COPY}, {"fills", "work", 201000, 20, 1, FILL}, {"halt", "work_210000", 210000, 20, 1, KERNEL},
    {"dies", "work_210000", 210000, 20, 1, KERNEL}, {"sparse", "work_210000", 210000, 1, 1, KERNEL},
    {"slow", "work_200000000", 200000000, 1, 1, KERNEL}, {"giant", "work_210000", 210000, 20, 1, KERNEL},
    {"deep", "work_210000", 210000, 1000, 1, KERNEL}, {"second", "work_1000000000", 1000000000, 1, 1, KERNEL},
    {"endless", "work_1000000000000", 1000000000000, 1, 1, KERNEL}};
struct launch_config { unsigned grid[3], block[3], shared; V stream, attributes; unsigned n; };
struct cooperative { V f; unsigned grid[3], block[3], shared; V stream, *parameters; };
struct place2 { size_t x, y; int type; V host; P device; V array; size_t pitch; };
struct place3 { size_t x, y, z, level; int type; V host; P device; V array, unused; size_t pitch, height; };
struct copy2 { struct place2 from, to; size_t width, height; };
struct copy3 { struct place3 from, to; size_t width, height, depth; };
struct batched { struct { int type; P device; size_t rest[3]; } from, to; size_t width, height, depth; int order, flags; };
#define DEVICE 0x7f0000000000ULL
/* Two copies from the host, which take no time, around two inside the device. */
static R batches(enum way way, V stream) {
    P to[] = {DEVICE, DEVICE, DEVICE, DEVICE}, from[] = {4096, DEVICE, DEVICE, 4096};
    size_t sizes[] = {1000000000, 220000000, 220000000, 1000000000}, which = 0, failed;
    if (way == OFFLOAD) sizes[1] = sizes[2] = 4096;
    if (way != BATCH_V1) return FOUND(cuMemcpyBatchAsync_v2, (P *, P *, size_t *, size_t, V, size_t *, size_t, V))(to, from, sizes, 4, NULL, &which, 1, stream);
    return FOUND(cuMemcpyBatchAsync, (P *, P *, size_t *, size_t, V, size_t *, size_t, size_t *, V))(to, from, sizes, 4, NULL, &which, 1, &failed, stream);
}
static R box_batches(int new, V stream) {
    struct batched list[] = {{{1, DEVICE, {0}}, {1, DEVICE, {0}}, 2000, 2200, 50, 0, 0}, {{2, 0, {0}}, {1, DEVICE, {0}}, 500, 2200, 50, 0, 0}};
    size_t failed;
    if (new) return FOUND(cuMemcpy3DBatchAsync_v2, (size_t, V, P, V))(2, list, 0, stream);
    return FOUND(cuMemcpy3DBatchAsync, (size_t, V, size_t *, P, V))(2, list, &failed, 0, stream);
}
static R launch(enum way way, V kernel, V stream) {
    switch (way) {
    case KERNEL: return cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    case GRAPH: return cuGraphLaunch(kernel, stream);
    case EXTENDED: return cuLaunchKernelEx(&(struct launch_config){.grid = {1, 1, 1}, .stream = stream}, kernel, NULL, NULL);
    case COOPERATIVE: return cuLaunchCooperativeKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
    case SEVERAL: return cuLaunchCooperativeKernelMultiDevice(&(struct cooperative){.f = kernel, .grid = {1, 1, 1}, .stream = stream}, 1, 0);
    case COPY: return cuMemcpyDtoDAsync(0, 0, 440000000, stream);
    case FILL: return cuMemsetD8Async(0, 0, 800000000, stream);
    case ANY: return FOUND(cuMemcpyAsync, (P, P, size_t, V))(DEVICE, DEVICE, 440000000, stream);
    case PEER: return FOUND(cuMemcpyPeerAsync, (P, V, P, V, size_t, V))(DEVICE, NULL, DEVICE, NULL, 440000000, stream);
    case FLAT: return FOUND(cuMemcpy2DAsync_v2, (const struct copy2 *, V))(&(struct copy2){{.type = 2}, {.type = 4, .device = DEVICE}, 20000, 22000}, stream);
    case BOX: return FOUND(cuMemcpy3DAsync_v2, (const struct copy3 *, V))(&(struct copy3){{.type = 3}, {.type = 2}, 2000, 2200, 100}, stream);
    case BOX_PEER: return FOUND(cuMemcpy3DPeerAsync, (const struct copy3 *, V))(&(struct copy3){{.type = 3}, {.type = 2}, 2000, 2200, 100}, stream);
    case BATCH: case BATCH_V1: case OFFLOAD: return batches(way, stream);
    case TO_ARRAY: return FOUND(cuMemcpyDtoA_v2, (V, size_t, P, size_t))(NULL, 0, DEVICE, 440000000);
    case FROM_ARRAY: return FOUND(cuMemcpyAtoD_v2, (P, V, size_t, size_t))(DEVICE, NULL, 0, 440000000);
    case ARRAYS: return FOUND(cuMemcpyAtoA_v2, (V, size_t, V, size_t, size_t))(NULL, 0, NULL, 0, 440000000);
    case BOXES: case BOXES_V1: return box_batches(way == BOXES, stream);
    case ATTRIBUTED: return FOUND(cuMemcpyWithAttributesAsync, (P, P, size_t, V, V))(DEVICE, DEVICE, 440000000, NULL, stream);
    case ATTRIBUTED_BOX: return FOUND(cuMemcpy3DWithAttributesAsync, (V, P, V))(&(struct batched){{1, DEVICE, {0}}, {1, DEVICE, {0}}, 2000, 2200, 100, 0, 0}, 0, stream);
    case FABRIC: return FOUND(cuFabricCpyBatchAsync, (size_t, V, P, V))(1, &(struct { P from[3], to[3]; size_t n; unsigned flags; }){.n = 440000000}, 0, stream);
    case DECOMPRESSED: return FOUND(cuMemBatchDecompressAsync, (V, size_t, unsigned, size_t *, V))(NULL, 1, 0, NULL, stream);
    case HALVES: return FOUND(cuMemsetD16Async, (P, unsigned short, size_t, V))(DEVICE, 0, 400000000, stream);
    case ROWS: return FOUND(cuMemsetD2D8Async, (P, size_t, unsigned char, size_t, size_t, V))(DEVICE, 0, 0, 20000, 40000, stream);
    case WORDS: return FOUND(cuMemsetD2D32Async, (P, size_t, unsigned, size_t, size_t, V))(DEVICE, 0, 0, 20000, 10000, stream);
    case GRID: return FOUND(cuLaunchGridAsync, (V, int, int, V))(kernel, 1, 1, stream);
    }
    return 1;
}
static struct { const struct job *job; N ms; int tenants, threads; } task;
struct worker { pthread_t thread; int own_stream; R r; N gpu_ns, ns; };
/* From now on only waiting takes time of the model clock. */
static void enter(int tenants, int idle_threads) {
    if (!model_enter) return;
    do usleep(2000); /* until the limiter's thread takes part in the model clock too; a main thread that joins others does not */
    while (model_threads() + idle_threads < own_threads());
    model_enter(tenants);
}
static V work_in_thread(V worker) {
    struct worker *w = worker;
    const struct job *j = task.job;
    R r = cuCtxSetCurrent(context);
    V kernel = launched(j->kernel), warm = launched("work_1000"), graph = NULL, stream = NULL;
    if (w->own_stream || j->way == GRAPH) r = cuStreamCreate(&stream, 1);
    if (j->way == GRAPH) {
        r = cuStreamBeginCapture(stream, 1);
        for (int i = 0; i < j->nodes && !r; i++) r = launch(KERNEL, kernel, stream);
        r = r || cuStreamEndCapture(stream, &graph) || cuGraphInstantiateWithFlags(&kernel, graph, 0);
    }
    r = r || launch(KERNEL, warm, stream) || cuStreamSynchronize(stream);
    enter(task.tenants, task.threads > 1);
    N begun = now(), rounds = 0;
    if (!strcmp(j->what, "giant")) r = launch(KERNEL, launched("work_10000000000"), stream);
    for (; !r && now() - begun < task.ms * 1000000; w->gpu_ns += j->each * j->batch * j->nodes) {
        for (int i = 0; i < j->batch && !r; i++) r = launch(j->way, kernel, stream);
        if (!strcmp(j->what, "sparse")) usleep(5000);
        if (!strcmp(j->what, "halt") && ++rounds == 100) model_stop();
        if (!strcmp(j->what, "dies") && ++rounds == 100) raise(SIGKILL);
        if (!r) r = cuStreamSynchronize(stream);
    }
    w->ns = now() - begun, w->r = r;
    if (model_leave) model_leave();
    return NULL;
}
/* The kernels' GPU time, and the time; `tenants` is the number of all threads that work. */
static R work(const char *what, N ms, int tenants, int threads, N *gpu_ns, N *ns) {
    struct worker workers[16] = {0};
    R r = 0;
    int k = 0;
    while (k < (int)(sizeof jobs / sizeof *jobs) - 1 && strcmp(what, jobs[k].what)) k++;
    task.job = &jobs[k], task.ms = ms, task.tenants = tenants, task.threads = threads;
    if (threads < 2) work_in_thread(workers);
    else if (model_leave) model_leave();
    for (int i = 0; threads > 1 && i < threads; i++) {
        workers[i].own_stream = i % 2;
        pthread_create(&workers[i].thread, NULL, work_in_thread, &workers[i]);
    }
    for (int i = 0; i < threads; i++) {
        if (threads > 1) pthread_join(workers[i].thread, NULL);
        r |= workers[i].r, *gpu_ns += workers[i].gpu_ns;
        if (workers[i].ns > *ns) *ns = workers[i].ns;
    }
    return r;
}
/* N children that stay until they are killed with this process; each claims what the limiter gives to a process. */
static int crowd(int number) {
    int ready[2], n = 0;
    char one;
    if (pipe(ready)) return 0;
    for (int i = 0; i < number; i++) {
        pid_t child = fork();
        if (child < 0) break;
        if (child) continue;
        P at;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        cuMemAlloc(&at, MIB); /* without a context the driver refuses it */
        if (write(ready[1], "", 1) == 1)
            for (;;) pause();
    }
    close(ready[1]);
    while (n < number && read(ready[0], &one, 1) == 1) n++;
    return n;
}
static V stay(V unused) {
    for (;;) pause();
    return unused;
}
/* A child that uses what it must not, after its parent's CUDA: it ends all the same. */
static R child_launches(void) {
    V kernel = launched("work_1000");
    pid_t child = fork();
    if (!child) {
        alarm(20);
        cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        exit(0);
    }
    R r = 0;
    waitpid(child, &r, 0);
    return r;
}
static R frees_late(N step, int number, int own_stream, N *before, N *used) {
    static P at[1000];
    P other;
    V stream = NULL, kernel = launched("work_1000000000");
    size_t n = 0, total = 0;
    R r = own_stream ? cuStreamCreate(&stream, 1) : 0;
    r = r || launch(KERNEL, launched("work_1000"), stream) || cuStreamSynchronize(stream);
    enter(1, 0);
    for (int i = 0; i < number && !r; i++) r = cuMemAlloc(&at[i], (size_t)step);
    r = r || cuMemGetInfo(&n, &total) || launch(KERNEL, kernel, stream);
    for (int i = 0; i < number && !r; i++) r = cuMemFreeAsync(at[i], stream);
    *before = r ? r : cuMemAlloc(&other, n + 1);
    r = r || cuStreamSynchronize(stream) || cuMemAlloc(&other, n + 1) || cuMemFree(other) || cuMemGetInfo(&n, &total);
    *used = (N)(total - n);
    if (model_leave) model_leave();
    return r;
}
static R idles(N step) {
    P at;
    R r = cuMemAlloc(&at, (size_t)step) || launch(KERNEL, launched("work_50000000"), NULL);
    return r || cuMemFreeAsync(at, NULL) || cuStreamSynchronize(NULL);
}
static V frees_until_cancelled(V step) {
    P at;
    if (cuCtxSetCurrent(context) || cuMemAlloc(&at, *(size_t *)step) || launch(KERNEL, launched("work_50000000"), NULL)) return NULL;
    pthread_cancel(pthread_self());
    cuMemFreeAsync(at, NULL);
    pthread_testcancel();
    return NULL;
}
static R cut(N step) {
    pthread_t thread;
    V end = NULL;
    R r = pthread_create(&thread, NULL, frees_until_cancelled, &step) || pthread_join(thread, &end);
    return r ? r : end == PTHREAD_CANCELED ? idles(step) : 1;
}
static R stream_ends(N step, int number, N *before, N *used) {
    P at[10], other;
    V stream = NULL, first = NULL;
    size_t n = 0, total = 0;
    R r = cuStreamCreate(&stream, 1) || launch(KERNEL, launched("work_1000"), stream) || cuStreamSynchronize(stream);
    enter(1, 0);
    for (int i = 0; i <= number && !r; i++) r = cuMemAlloc(&at[i], (size_t)step);
    r = r || cuMemGetInfo(&n, &total) || launch(KERNEL, launched("work_1000000"), stream);
    for (int i = 0; i < number && !r; i++) r = cuMemFreeAsync(at[i], stream);
    r = r || FOUND(cuEventCreate, (V *, unsigned))(&first, 0) || FOUND(cuEventRecord, (V, V))(first, stream);
    r = r || launch(KERNEL, launched("work_1000000000"), stream) || cuMemFreeAsync(at[number], stream) || FOUND(cuStreamDestroy_v2, (V))(stream);
    r = r || FOUND(cuEventSynchronize, (V))(first);
    *before = r ? r : cuMemAlloc(&other, n + (size_t)(number * step) + 1);
    r = r || cuCtxSynchronize() || cuMemGetInfo(&n, &total);
    *used = (N)(total - n);
    if (model_leave) model_leave();
    return r;
}
static V launches_until(V end) {
    R r = cuCtxSetCurrent(context);
    V kernel = launched("work_2000000");
    while (!r && !__atomic_load_n((int *)end, __ATOMIC_RELAXED)) r = launch(KERNEL, kernel, NULL);
    return NULL;
}
static int events(int failures, R *r) {
    R (*fake)(unsigned) = (R(*)(unsigned))dlsym(library, "cuFakeEvents");
    V kernel = launched("work_1000");
    int n = 0;
    fake(1);
    for (int i = 0; i < failures * 200 && !*r; i++) {
        *r = launch(KERNEL, kernel, NULL);
        if (i % 200 == 0) fake(1);
    }
    n = fake(0);
    return n;
}
static int retains(int number, int own, R *r) {
    V same, other, kernel = launched("work_1000");
    if (own) *r = cuCtxCreate(&other, NULL, 0, 0) || FOUND(cuDevicePrimaryCtxRelease_v2, (int))(0); /* the one of `init` */
    for (int i = 0; i < number && !*r; i++)
        *r = cuDevicePrimaryCtxRetain(&same, 0) || launch(KERNEL, kernel, NULL) || FOUND(cuDevicePrimaryCtxRelease_v2, (int))(0);
    return FOUND(cuFakeEvents, (unsigned))(0);
}
static int within;
static V launches_until_cancelled(V kernel) {
    R r = cuCtxSetCurrent(context);
    for (; !r; pthread_testcancel()) {
        within = 1, r = launch(KERNEL, kernel, NULL);
        within = 0;
    }
    return NULL;
}
static int cancels(int number, int full, R *r) {
    int cut = 0;
    V kernel = launched("work_2000000");
    if (full) FOUND(cuFakeEvents, (unsigned))(100000);
    for (int i = 0; i < number && !*r; i++, cut += within, within = 0) {
        pthread_t thread;
        if ((*r = pthread_create(&thread, NULL, launches_until_cancelled, kernel))) break;
        usleep(20000);
        pthread_cancel(thread);
        pthread_join(thread, NULL);
    }
    return cut;
}
static V launches_once(V r) {
    *(R *)r = cuCtxSetCurrent(context) || launch(KERNEL, launched("work_1000"), NULL) || cuCtxSynchronize();
    return NULL;
}
static int passing(int number, R *r) {
    for (int i = 0; i < number && !*r; i++) {
        pthread_t thread;
        if (!(*r = pthread_create(&thread, NULL, launches_once, r))) pthread_join(thread, NULL);
    }
    return FOUND(cuFakeEvents, (unsigned))(0);
}
static int compare(const void *a, const void *b) { return *(const N *)a < *(const N *)b ? -1 : *(const N *)a > *(const N *)b; }
static N own_p50, own_p99; /* of the last `latency`, in ns */
static void quantiles(N *took, N all, N *p50, N *p99) {
    qsort(took, (size_t)all, sizeof *took, compare);
    *p50 = took[all / 2], *p99 = took[all * 99 / 100];
    free(took);
}
static R latency(int bursts, N *p50, N *p99) {
    enum { BURST = 250 };
    N all = (N)bursts * BURST, *took = calloc((size_t)all, sizeof *took), *own = calloc((size_t)all, sizeof *own), in_driver = 0;
    R (*driver)(N *) = (R(*)(N *))dlsym(library, "cuFakeLaunchNs");
    V kernel = launched("work_0");
    R r = 0;
    for (int i = 0; i < bursts && !r; i++) {
        for (int k = 0; k < 50 && !r; k++) r = launch(KERNEL, kernel, NULL); /* the first one waits for the turn */
        for (int k = 0; k < BURST && !r; k++) {
            N begun = now();
            r = launch(KERNEL, kernel, NULL);
            took[i * BURST + k] = now() - begun;
            r = r ? r : driver(&in_driver);
            own[i * BURST + k] = took[i * BURST + k] - in_driver;
        }
        r = r ? r : cuCtxSynchronize();
        usleep(30000);
    }
    quantiles(took, all, p50, p99);
    quantiles(own, all, &own_p50, &own_p99);
    return r;
}
/* Forks while four threads launch, and wait for the turn. */
static R forks(int number) {
    pthread_t thread[4];
    int end = 0;
    R r = 0;
    for (int i = 0; i < 4; i++) pthread_create(&thread[i], NULL, launches_until, &end);
    for (int i = 0; i < number && !r; i++) r = child_launches();
    __atomic_store_n(&end, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
    return r;
}
static int reduce(int number, int first, N ms, int tenants, int together) {
    char name[64];
    V contexts[2], streams[2], warm;
    int rounds = 0;
    R r = 0;
    snprintf(name, sizeof name, "meet_%d_2_200000", number);
    for (int d = 0; d < 2 && !r; d++) {
        r = cuDevicePrimaryCtxRetain(&contexts[d], d) || cuCtxSetCurrent(contexts[d]);
        warm = launched("work_1000");
        r = r || cuStreamCreate(&streams[d], 1) || launch(KERNEL, warm, streams[d]) || cuCtxSynchronize();
    }
    V meeting = launched(name);
    struct cooperative both[2];
    for (int i = 0; i < 2; i++) both[i] = (struct cooperative){.f = meeting, .grid = {1, 1, 1}, .stream = streams[(i + first) % 2]};
    if (model_enter) {
        do usleep(2000);
        while (model_threads() < own_threads());
        model_enter(tenants);
    }
    for (N begun = now(); !r && now() - begun < ms * 1000000; rounds++) {
        if (together) r = cuLaunchCooperativeKernelMultiDevice(both, 2, 0);
        for (int i = 0; i < 2 && !r && !together; i++) r = launch(KERNEL, meeting, both[i].stream);
        for (int i = 0; i < 2 && !r; i++) r = cuCtxSetCurrent(contexts[i]) || cuCtxSynchronize();
    }
    if (model_leave) model_leave();
    return r ? -r : rounds;
}
static N capture_until;
static V captures_in_thread(V failed) {
    R r = cuCtxSetCurrent(context);
    V stream, graph, exec, kernel = launched("work_1000");
    N n = 0;
    if (!r) r = cuStreamCreate(&stream, 1);
    for (; !r && now() < capture_until; n++) {
        r = cuStreamBeginCapture(stream, 0);
        for (int i = 0; i < 20 && !r; i++) r = launch(KERNEL, kernel, stream);
        usleep(100); /* the other thread launches meanwhile */
        if (!r) r = cuStreamEndCapture(stream, &graph);
        if (!r) r = cuGraphInstantiateWithFlags(&exec, graph, 0);
        if (!r) r = launch(GRAPH, exec, stream);
        if (!r) r = cuStreamSynchronize(stream);
        if (!r) r = cuGraphExecDestroy(exec);
    }
    *(R *)failed = r;
    return (V)(uintptr_t)n;
}
static R captures(N ms, N *n) {
    pthread_t thread;
    R failed = 0, r = 0;
    V number, kernel = launched("work_210000");
    capture_until = now() + ms * 1000000;
    pthread_create(&thread, NULL, captures_in_thread, &failed);
    while (!r && now() < capture_until) r = launch(KERNEL, kernel, NULL);
    pthread_join(thread, &number);
    *n = (N)(uintptr_t)number;
    return r ? r : failed ? failed : cuCtxSynchronize();
}
static R captured(const char *how, int per_thread, N *given) {
    V stream, graph = NULL, kernel = launched("work_1000"), known = NULL;
    R r = cuStreamCreate(&stream, 1) || cuGraphCreate(&known, 0);
    R (*to)(V, V, V, V, size_t, int) = per_thread ? FOUND(cuStreamBeginCaptureToGraph_ptsz, (V, V, V, V, size_t, int)) : FOUND(cuStreamBeginCaptureToGraph, (V, V, V, V, size_t, int));
    R (*again)(V, int, V, V, V) = per_thread ? FOUND(cuStreamBeginRecaptureToGraph_ptsz, (V, int, V, V, V)) : FOUND(cuStreamBeginRecaptureToGraph, (V, int, V, V, V));
    if (r) return r;
    r = !strcmp(how, "given") ? to(stream, known, NULL, NULL, 0, 0) : !strcmp(how, "again") ? again(stream, 0, known, NULL, NULL) : cuStreamBeginCapture(stream, 0);
    for (int i = 0; i < 3 && !r; i++) r = launch(KERNEL, kernel, stream);
    r = r || cuStreamEndCapture(stream, &graph);
    *given = graph == known;
    return r;
}
static struct { int word; size_t bytes; R r; } late;
static V allocate_late(V unused) {
    P at;
    FOUND(cuFakeHoldPool, (int *))(&late.word);
    late.r = cuCtxSetCurrent(context) || cuMemAllocAsync(&at, late.bytes, NULL);
    return unused;
}
static R pools(N bytes) {
    pthread_t thread;
    P at;
    late.bytes = (size_t)bytes;
    R r = pthread_create(&thread, NULL, allocate_late, NULL);
    while (!r && __atomic_load_n(&late.word, __ATOMIC_SEQ_CST) != 1) usleep(1000);
    r = r || cuMemAllocAsync(&at, (size_t)bytes, NULL);
    __atomic_store_n(&late.word, 2, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    return r ? r : late.r;
}
static R step(const char *name, int pid, P timeout, N *state) {
    static const struct { const char *name; R (**function)(int, const P *); } steps[] = {
        {"lock", &cuCheckpointProcessLock}, {"checkpoint", &cuCheckpointProcessCheckpoint}, {"restore", &cuCheckpointProcessRestore},
        {"unlock", &cuCheckpointProcessUnlock}};
    const P arguments[8] = {!strcmp(name, "lock") ? timeout : 0};
    int now = -1;
    R r = cuInit(0), s;
    for (int i = 0; i < 4; i++)
        if (!strcmp(steps[i].name, name)) r = (*steps[i].function)(pid, arguments);
    s = cuCheckpointProcessGetState(pid, &now);
    *state = now;
    return r ? r : s;
}
static volatile unsigned *page(const char *folder, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s.1", folder, name);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    V at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at;
}
static R suspend(const char *line, N *asked, N *state) {
    int pid, tenants;
    N after, how_long;
    char folder[200];
    sscanf(line, "%*s %d %lld %lld %d %199s", &pid, &after, &how_long, &tenants, folder);
    volatile unsigned *word = page(folder, "limits") + 3, *request = page(folder, "use") + 3;
    R r = cuInit(0);
    if (model_enter) model_enter(tenants);
    usleep((unsigned)after * 1000);
    *request = 0, *word = 1;
    usleep(100000);
    r = r || step("lock", pid, 0, state) || step("checkpoint", pid, 0, state);
    for (N i = 0; how_long ? i < how_long : !*request; i++) usleep(1000);
    N last;
    *asked = *request != 0;
    r = r || step("restore", pid, 0, &last) || step("unlock", pid, 0, &last);
    *word = 0;
    if (model_leave) model_leave();
    return r;
}
static V allocate(V out) {
    P at;
    R *r = out;
    cuCtxSetCurrent(context);
    r[0] = cuMemAllocAsync(&at, 1 << 20, NULL); /* allowed; its pool is looked at by the library */
    r[1] = cuMemAlloc(&at, 1 << 20);            /* forbidden, and it ends the capture */
    return NULL;
}
static int each;
static V churn(V out) {
    P at[8] = {0};
    R *failed = out;
    unsigned seed = (unsigned)(uintptr_t)out;
    cuCtxSetCurrent(context);
    for (int i = 0; i < each; i++) {
        int k = (int)(rand_r(&seed) % 8);
        if (at[k]) *failed += cuMemFree(at[k]) != 0, at[k] = 0;
        else *failed += cuMemAlloc(&at[k], 1 + rand_r(&seed) % (unsigned)MIB) != 0;
    }
    for (int k = 1; k < 8; k++)
        if (at[k]) *failed += cuMemFree(at[k]) != 0;
    return NULL;
}
static int threads(int n) {
    pthread_t thread[64];
    R failed[64] = {0}, sum = 0;
    for (int i = 0; i < n && i < 64; i++) pthread_create(&thread[i], NULL, churn, &failed[i]);
    for (int i = 0; i < n && i < 64; i++) pthread_join(thread[i], NULL), sum += failed[i];
    return sum;
}
static void capture(void) {
    V stream, graph;
    R r[3];
    pthread_t thread;
    for (int forbidden = 0; forbidden < 2; forbidden++) {
        cuStreamCreate(&stream, 1);
        cuStreamBeginCapture(stream, 0);
        P at;
        if (forbidden) pthread_create(&thread, NULL, allocate, r), pthread_join(thread, NULL);
        else cuMemAllocAsync(&at, 1 << 20, stream);
        r[2] = cuStreamEndCapture(stream, &graph);
        if (!forbidden) printf("%d ", r[2]);
    }
    printf("%d %d %d\n", r[0], r[1], r[2]);
}
static void nvml(void) {
    unsigned long long m[3] = {0};
    unsigned processes = 8;
    struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } list[8];
    V nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), device = NULL;
    ((R(*)(void))dlsym(nvml, "nvmlInit_v2"))();
    ((R(*)(unsigned, V *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device);
    R r = ((R(*)(V, V))dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(device, m);
    R s = ((R(*)(V, unsigned *, V))dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3"))(device, &processes, list);
    struct { unsigned long long words[4]; } detailed[8];
    struct { unsigned version, mode, n; V list; } details = {0x1000018, 0, 8, detailed};
    R t = ((R(*)(V, V))dlsym(nvml, "nvmlDeviceGetRunningProcessDetailList"))(device, &details);
    printf("%d %llu %llu %u\n", r ? r : s ? s : t, m[1], m[0], details.n == processes && (unsigned)detailed[0].words[0] == list[0].pid ? processes : 99);
}

int main(int argc, char **argv) {
    char line[256], word[32], name[32];
    N a, b, c, x = 0, y = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    setvbuf(stdin, NULL, _IONBF, 0); /* what follows `exec` is the next program's */
    if (argc < 2 || !load(argv[1])) return 3;
    while (fgets(line, sizeof line, stdin)) {
        R r = 0;
        size_t n = 0, total = 0;
        *name = 0, a = b = c = x = y = 0;
        sscanf(line, "%31s %lld %lld %lld", word, &a, &b, &c);
        if (sscanf(line, "%31s %31[a-z] %lld %lld", word, name, &b, &c) < 2) *name = 0;
        if (!strcmp(word, "init")) {
            r = cuInit(0);
            if (!r) r = cuDevicePrimaryCtxRetain(&context, (int)a);
            if (!r) r = cuCtxSetCurrent(context);
        } else if (!strcmp(word, "info")) r = cuMemGetInfo(&n, &total), x = (N)n, y = (N)total;
        else if (!strcmp(word, "total")) r = cuDeviceTotalMem(&total, 0), y = (N)total;
        else if (!strcmp(word, "grab")) r = grab(name, b, c, &x);
        else if (!strcmp(word, "free")) {
            while (count && !r) r = drop(count - 1);
            if (own_pool && !r) r = cuMemPoolDestroy(own_pool), own_pool = NULL;
        } else if (!strcmp(word, "keep")) {
            for (int i = count - 1; i >= 0 && !r; i--)
                if (i % a) r = drop(i);
            x = count;
        } else if (!strcmp(word, "shapes")) x = shapes(line, &r);
        else if (!strcmp(word, "second")) r = second(a, &x);
        else if (!strcmp(word, "threads")) each = (int)b, x = threads((int)a);
        else if (!strcmp(word, "graph")) {
            char when[16] = "";
            int device = 0;
            sscanf(line, "%*s %*d %15s %d", when, &device);
            r = graph(a, when, device, &x);
        }
        else if (!strcmp(word, "crowd")) x = crowd((int)a);
        else if (!strcmp(word, "close")) r = dlclose(dlopen("libcuda.so.1", RTLD_NOW)) || dlclose(library);
        else if (!strcmp(word, "exec")) {
            if (model_leave) model_leave();
            r = FOUND(cuFakeExec, (void))() || execv("/proc/self/exe", argv);
        }
        else if (!strcmp(word, "sleep")) r = FOUND(cuFakeExec, (void))() || execlp("sleep", "sleep", "infinity", NULL);
        else if (!strcmp(word, "leave")) {
            pthread_t thread;
            pthread_create(&thread, NULL, stay, NULL);
            pthread_exit(NULL);
        } else if (!strcmp(word, "child")) r = child_launches();
        else if (!strcmp(word, "latency")) r = latency((int)a, &x, &y);
        else if (!strcmp(word, "calls")) r = FOUND(cuFakeCalls, (N *))(&x);
        else if (!strcmp(word, "own")) x = own_p50, y = own_p99;
        else if (!strcmp(word, "orphan")) r = orphan(a, &x, &y);
        else if (!strcmp(word, "events")) x = events((int)a, &r);
        else if (!strcmp(word, "exchanges")) r = FOUND(cuFakeExchangeNs, (unsigned))((unsigned)a);
        else if (!strcmp(word, "retains")) x = retains((int)a, (int)b, &r);
        else if (!strcmp(word, "captured")) r = captured(name, (int)b, &x);
        else if (!strcmp(word, "idles")) r = idles(a);
        else if (!strcmp(word, "cut")) r = cut(a);
        else if (!strcmp(word, "ends")) r = stream_ends(a, (int)b, &x, &y);
        else if (!strcmp(word, "late")) {
            int own = 0;
            sscanf(line, "%*s %*d %*d %d", &own);
            r = frees_late(a, (int)b, own, &x, &y);
        }
        else if (!strcmp(word, "pools")) r = pools(a);
        else if (!strcmp(word, "cancels")) x = cancels((int)a, (int)b, &r);
        else if (!strcmp(word, "passing")) x = passing((int)a, &r);
        else if (!strcmp(word, "forks")) r = forks((int)a);
        else if (!strcmp(word, "captures")) r = captures(a, &x);
        else if (!strcmp(word, "step")) r = step(name, (int)b, (P)c, &x);
        else if (!strcmp(word, "suspend")) r = suspend(line, &x, &y);
        else if (!strcmp(word, "reduce")) {
            int number, first, ms, tenants, together = 0;
            sscanf(line, "%*s %d %d %d %d %d", &number, &first, &ms, &tenants, &together);
            x = reduce(number, first, ms, tenants, together), r = x < 0;
        }
        else if (!strcmp(word, "trim")) r = cuDeviceGraphMemTrim(0);
        else if (!strcmp(word, "random")) x = operations((unsigned)a, (int)b, c);
        else if (!strcmp(word, "reset")) count = 0, r = cuDevicePrimaryCtxReset(0);
        else if (!strcmp(word, "work")) {
            int threads = 1;
            sscanf(line, "%*s %*s %*d %*d %d", &threads);
            r = work(name, b, (int)c, threads, &x, &y);
        } else if (!strcmp(word, "fork")) {
            pid_t child = fork();
            if (!child) {
                count = 0;
                r = cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ? 3 : grab(name, b, c, &x);
                _exit(r);
            }
            waitpid(child, &r, 0);
            r = WEXITSTATUS(r);
        } else if (!strcmp(word, "capture")) { capture(); continue; }
        else if (!strcmp(word, "nvml")) { nvml(); continue; }
        else r = 999;
        printf("%d %lld %lld\n", r, x, y);
    }
    return 0;
}
