/* A program linked to the driver that does what programs do seldom or by mistake. Each line has a name, the driver's answers, and by how
 * much the memory in use grew; with the library the lines are the same as without. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef uint64_t P;
typedef void *V;
typedef unsigned U;
enum { STEP = 4 << 20 };
struct property { int type, handles, location, id; V security; unsigned char rest[8]; };
struct pool_property { int type, handles, location, id; V security; size_t most; unsigned char rest[56]; };
struct array { size_t width, height; int format; U channels; };
struct array3 { size_t width, height, depth; int format; U channels, flags; };
struct launch_config { U grid[3], block[3], shared; V stream, attributes; U n; };
struct ipc { char b[64]; };
extern R cuInit(U), cuDevicePrimaryCtxRetain(V *, int), cuDevicePrimaryCtxRelease_v2(int), cuDevicePrimaryCtxReset_v2(int), cuCtxSetCurrent(V),
    cuCtxCreate_v4(V *, V, U, int), cuCtxDestroy_v2(V), cuMemGetInfo_v2(size_t *, size_t *), cuDeviceTotalMem_v2(size_t *, int), cuMemAlloc_v2(P *, size_t),
    cuMemFree_v2(P), cuMemAllocAsync(P *, size_t, V), cuMemFreeAsync(P, V), cuMemAllocManaged(P *, size_t, U),
    cuMemAllocPitch_v2(P *, size_t *, size_t, size_t, U), cuMemCreate(P *, size_t, const struct property *, P), cuMemRelease(P),
    cuMemExportToShareableHandle(V, P, int, P), cuMemImportFromShareableHandle(P *, V, int), cuIpcOpenMemHandle_v2(P *, struct ipc, U),
    cuIpcCloseMemHandle(P), cuMemPoolCreate(V *, const struct pool_property *), cuMemPoolDestroy(V), cuMemGetDefaultMemPool(V *, const int *, int),
    cuMemGetMemPool(V *, const int *, int), cuMemMapArrayAsync(V, U, V), cuMemAllocFromPoolAsync(P *, size_t, V, V),
    cuArrayCreate_v2(P *, const struct array *), cuArray3DCreate_v2(P *, const struct array3 *), cuArrayDestroy(P), cuModuleLoadData(V *, const char *),
    cuModuleGetFunction(V *, V, const char *), cuLaunchKernel(V, U, U, U, U, U, U, U, V, V *, V *), cuLaunchKernelEx(const struct launch_config *, V, V *, V *),
    cuFakeLastAttribute(U *), cuDeviceGetAttribute(int *, int, int), cuStreamCreate(V *, U), cuStreamDestroy_v2(V), cuCtxSynchronize(void),
    cuGetProcAddress_v2(const char *, V *, int, P, int *), cuGreenCtxCreate(V *, V, int, U), cuGreenCtxDestroy(V),
    cuGreenCtxStreamCreate(V *, V, U, int);

static V context;
static int64_t used(void) {
    size_t n = 0, total = 0;
    cuMemGetInfo_v2(&n, &total);
    return (int64_t)(total - n);
}
static int64_t before;
#define SAY(name, ...) \
    do { \
        R answers[] = {__VA_ARGS__}; \
        int64_t now = used(); \
        printf("%s:", name); \
        for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) printf(" %d", answers[i]); \
        printf(", %+lld\n", (long long)(now - before)); \
        before = now; \
    } while (0)

static struct { int location; P handle; R result; } located;
static V create_without_a_context(V unused) {
    located.result = cuMemCreate(&located.handle, STEP, &(struct property){.type = 1, .location = located.location}, 0);
    return unused;
}
static void places(void) {
    static const int places[] = {1, 2, 3, 4, 6}; /* device, host, one NUMA node, the current one, a part of a device */
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++) {
        int location = places[i];
        pthread_t thread;
        located.location = location;
        pthread_create(&thread, NULL, create_without_a_context, NULL);
        pthread_join(thread, NULL);
        SAY("created without a context", located.result);
        SAY("released", cuMemRelease(located.handle));
        V pool;
        P at;
        R r = cuMemPoolCreate(&pool, &(struct pool_property){.type = 1, .location = location});
        SAY("from a pool", r, cuMemAllocFromPoolAsync(&at, STEP, pool, NULL));
        SAY("pool destroyed", cuMemFreeAsync(at, NULL), cuMemPoolDestroy(pool));
    }
}
/* Pools that the program did not make, as CUDA 13 gives them: a device's, and one of managed memory, which keeps what it has. */
static void pools(void) {
    for (int type = 1; type <= 2; type++)
        for (int current = 0; current < 2; current++) {
            V pool;
            P at;
            int where[] = {type == 1, 0};
            R r = (current ? cuMemGetMemPool : cuMemGetDefaultMemPool)(&pool, where, type);
            SAY("from a given pool", r, cuMemAllocFromPoolAsync(&at, STEP, pool, NULL));
            SAY("freed", cuMemFreeAsync(at, NULL));
        }
}
static void shared(void) {
    int number = 0;
    P own, imported, opened;
    SAY("created", cuMemCreate(&own, STEP, &(struct property){.type = 1, .location = 1}, 0));
    SAY("exported and imported", cuMemExportToShareableHandle(&number, own, 1, 0), cuMemImportFromShareableHandle(&imported, (V)(intptr_t)number, 1));
    SAY("opened", cuIpcOpenMemHandle_v2(&opened, (struct ipc){"x"}, 0));
    SAY("closed", cuIpcCloseMemHandle(opened), cuMemRelease(imported));
    SAY("released", cuMemRelease(own), cuMemRelease(own));
}
/* Memory behind a part of a sparse array is in use until it is unmapped, also without its handle. */
static void sparse(void) {
    struct { int type; P array; int part_type; P part[4]; int operation, handle_type; P handle, rest[3]; } m[2] = {{.part = {1}, .operation = 1}};
    struct property here = {.type = 1, .location = 1};
    SAY("sparse array", cuArray3DCreate_v2(&m[0].array, &(struct array3){64, 64, 0, 32, 1, 0x40}));
    m[1] = m[0], m[1].part[0] = 2;
    SAY("created", cuMemCreate(&m[0].handle, STEP, &here, 0), cuMemCreate(&m[1].handle, STEP, &here, 0));
    SAY("mapped", cuMemMapArrayAsync(m, 2, NULL), cuMemRelease(m[0].handle), cuMemRelease(m[1].handle));
    for (int i = 1; i >= 0; i--) {
        m[i].operation = 2;
        SAY("unmapped", cuMemMapArrayAsync(&m[i], 1, NULL));
    }
    for (int i = 0; i < 2; i++) m[i].operation = 1;
    SAY("created and mapped", cuMemCreate(&m[0].handle, STEP, &here, 0), cuMemCreate(&m[1].handle, STEP, &here, 0), cuMemMapArrayAsync(m, 2, NULL));
    SAY("released", cuMemRelease(m[0].handle), cuMemRelease(m[1].handle));
    SAY("sparse array destroyed", cuArrayDestroy(m[0].array));
    V own;
    R r = cuCtxCreate_v4(&own, NULL, 0, 0) || cuArray3DCreate_v2(&m[0].array, &(struct array3){64, 64, 0, 32, 1, 0x40});
    SAY("in a context", r, cuMemCreate(&m[0].handle, STEP, &here, 0), cuMemMapArrayAsync(m, 1, NULL), cuMemRelease(m[0].handle));
    SAY("context destroyed", cuCtxDestroy_v2(own) || cuCtxSetCurrent(context));
}
static V free_it(V at) { return (V)(intptr_t)cuMemFree_v2((P)(uintptr_t)at); }
static void frees(void) {
    P plain, pooled;
    pthread_t thread;
    V result;
    SAY("plain and pooled", cuMemAlloc_v2(&plain, STEP), cuMemAllocAsync(&pooled, STEP, NULL));
    SAY("each freed by the other's function", cuMemFreeAsync(plain, NULL), cuMemFree_v2(pooled));
    SAY("freed twice", cuMemFree_v2(plain), cuMemFree_v2(0x1234000), cuMemFree_v2(0), cuArrayDestroy(0x1234000), cuMemRelease(0x1234000));
    SAY("plain", cuMemAlloc_v2(&plain, STEP));
    pthread_create(&thread, NULL, free_it, (V)(uintptr_t)plain);
    pthread_join(thread, &result);
    SAY("freed by a thread without a context", (R)(intptr_t)result);
}
static void nothing(void) {
    P at;
    size_t n;
    SAY("NULL", cuMemAlloc_v2(NULL, STEP), cuMemAllocAsync(NULL, STEP, NULL), cuMemAllocManaged(NULL, STEP, 1), cuMemAllocPitch_v2(NULL, &n, 1, 1, 4),
        cuMemAllocPitch_v2(&at, NULL, 1, 1, 4), cuMemCreate(NULL, STEP, &(struct property){.type = 1, .location = 1}, 0), cuMemCreate(&at, STEP, NULL, 0),
        cuArrayCreate_v2(NULL, &(struct array){64, 64, 32, 1}), cuArrayCreate_v2(&at, NULL), cuMemGetInfo_v2(NULL, &n), cuMemGetInfo_v2(&n, NULL),
        cuDeviceTotalMem_v2(NULL, 0), cuMemPoolCreate(NULL, NULL), cuDevicePrimaryCtxRetain(NULL, 0), cuCtxCreate_v4(NULL, NULL, 0, 0),
        cuLaunchKernelEx(NULL, NULL, NULL, NULL), cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    SAY("no such device", cuDeviceTotalMem_v2(&n, 9), cuDevicePrimaryCtxRetain(&(V){NULL}, 9), cuMemCreate(&at, STEP, &(struct property){.type = 1, .location = 1, .id = 9}, 0));
}
/* Products that exceed 64 bits: what they wrap to would fit. Only with the argument `sizes`. */
static void sizes(void) {
    size_t pitch;
    P at;
    SAY("more than there is", cuMemAlloc_v2(&at, SIZE_MAX), cuMemAllocManaged(&at, SIZE_MAX - 511, 1), cuMemAllocAsync(&at, SIZE_MAX, NULL),
        cuMemAllocPitch_v2(&at, &pitch, 1ull << 32, (1ull << 32) + 1, 4), cuArrayCreate_v2(&at, &(struct array){1ull << 32, (1ull << 32) + 128, 32, 1}),
        cuArray3DCreate_v2(&at, &(struct array3){1ull << 22, 1ull << 22, (1ull << 22) + 4, 32, 4, 0}));
}
static void capabilities(void) {
    for (int i = 1; i < 150; i++) {
        int value = -1;
        R r = cuDeviceGetAttribute(&value, i, 0);
        SAY("attribute", r, value);
    }
}
static V module;
static void launches(void) {
    V kernel;
    U seen = 0, attribute = 77;
    R r = cuModuleLoadData(&module, "") || cuModuleGetFunction(&kernel, module, "work_10000");
    before = used();
    SAY("attributes", r, cuLaunchKernelEx(&(struct launch_config){.grid = {1, 1, 1}, .attributes = &attribute, .n = 1}, kernel, NULL, NULL),
        cuFakeLastAttribute(&seen), (R)seen);
    for (int i = 0; i < 200 && !r; i++) { /* work goes on when its stream ends; the handle is used again */
        V stream;
        r = cuStreamCreate(&stream, 1);
        for (int k = 0; k < 5 && !r; k++) r = cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
        r = r || cuStreamDestroy_v2(stream);
    }
    SAY("streams that end with work", r, cuCtxSynchronize());
    for (int i = 0; i < 20 && !r; i++) {
        V own, stream;
        r = cuCtxCreate_v4(&own, NULL, 0, 0) || cuStreamCreate(&stream, 1);
        for (int k = 0; k < 5 && !r; k++) r = cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, k % 2 ? stream : NULL, NULL, NULL);
        usleep(2000); /* the library's thread follows the work */
        r = r || cuCtxDestroy_v2(own) || cuCtxSetCurrent(context);
    }
    SAY("contexts that end with work", r, cuCtxSynchronize());
    r = r || cuModuleGetFunction(&kernel, module, "work_2000000");
    for (int i = 0; i < 20 && !r; i++) {
        V own, stream;
        r = cuGreenCtxCreate(&own, NULL, 0, 1) || cuGreenCtxStreamCreate(&stream, own, 1, 0);
        r = r || cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
        usleep(1000);
        r = r || cuGreenCtxDestroy(own);
    }
    SAY("green contexts that end with work", r, cuCtxSynchronize());
}
/* The driver may give a context the address of one that ended, and memory in it the same addresses. */
static void again(void) {
    V own, kernel;
    P at;
    R r = cuCtxCreate_v4(&own, NULL, 0, 0) || cuModuleGetFunction(&kernel, module, "work_50000000");
    r = r || cuMemAlloc_v2(&at, 4096) || cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) || cuMemFreeAsync(at, NULL);
    r = r || cuCtxDestroy_v2(own) || cuCtxCreate_v4(&own, NULL, 0, 0) || cuMemAlloc_v2(&at, 4096);
    SAY("a context after one whose stream had yet to free", r);
    SAY("destroyed", cuCtxDestroy_v2(own) || cuCtxSetCurrent(context));
}
static void newer(void) {
    V found = NULL;
    SAY("a version of the future", cuGetProcAddress_v2("cuMemAlloc", &found, 99000, 0, NULL), found == (V)cuMemAlloc_v2);
}
static void resets(void) {
    P at;
    V again;
    SAY("plain and pooled", cuMemAlloc_v2(&at, STEP), cuMemAllocAsync(&at, STEP, NULL), cuDevicePrimaryCtxRetain(&again, 0));
    SAY("released once", cuDevicePrimaryCtxRelease_v2(0));
    R r = cuDevicePrimaryCtxReset_v2(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context);
    SAY("reset", r);
    SAY("plain", cuMemAlloc_v2(&at, STEP));
    SAY("released", cuMemFree_v2(at));
}

int main(int argc, char **argv) {
    (void)argv;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    before = used();
    if (argc > 1) {
        sizes();
        return 0;
    }
    capabilities();
    places();
    pools();
    shared();
    sparse();
    frees();
    nothing();
    launches();
    again();
    newer();
    resets();
    return 0;
}
