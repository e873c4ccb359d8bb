/* Wrappers of allocations: each reserves first, calls the driver, and gives the reservation back if the driver refuses. A call beyond the
 * limit always returns CUDA_ERROR_OUT_OF_MEMORY. The driver's other results are returned unchanged. Calls with a NULL output,
 * for a device without a limit, or for memory that is not on a device, are passed to the driver. */
#include "memory.h"
#include <stdlib.h>

#define BLOCK (2ull << 20)      /* the unit in which the driver takes memory of the GPU */
#define POOL_STEP (32ull << 20) /* by which the driver lets a pool grow */
typedef unsigned int uint;
typedef struct { int type, id; } location; /* CUmemLocation */
struct allocation_properties { int type, handles; location where; void *security; uint8_t flags[8]; };
struct pool_properties { int type, handles; location where; void *security; size_t most; uint8_t reserved[56]; };
struct array2 { size_t width, height; int format; uint channels; };
struct array3 { size_t width, height, depth; int format; uint channels, flags; };
struct array2_v1 { uint width, height; int format; uint channels; };
struct array3_v1 { uint width, height, depth; int format; uint channels, flags; };
enum { LAYERED = 1, CUBE = 4, SPARSE = 0x40, DEFERRED = 0x80 }; /* sparse and deferred: without memory of their own */

/* The product, or the largest number, which no limit allows. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}
static uint64_t mixed(uint64_t key, uint64_t part) { return (key ^ part) * 0x9e3779b97f4a7c15; }
static uint64_t rounded(uint64_t n, uint64_t step) { return n > UINT64_MAX - step ? UINT64_MAX : (n + step - 1) / step * step; }

/* 1: a device; 6: a part of one, with the device in the lowest byte; others are not on a device. */
static CUdevice device_at(location where) { return where.type == 1 ? where.id : where.type == 6 ? where.id & 0xff : -1; }
static CUcontext current_context(void) {
    CUcontext c = NULL;
    return ASK(cuCtxGetCurrent, (CUcontext *), &c) == CUDA_SUCCESS ? c : NULL;
}
static CUresult refuse(int gpu) {
    gm_refused(gpu);
    return CUDA_ERROR_OUT_OF_MEMORY;
}
/* Reserves. If this fails, makes pools give back what they don't use, and tries again. */
static bool reserve(int gpu, enum gm_kind kind, uint64_t bytes) {
    if (gm_reserve(gpu, kind, bytes)) return true;
    if (bytes > gm_memory_limit(gpu)) return false;
    gm_memory_settle(true);
    return gm_reserve(gpu, kind, bytes);
}

static void reference(struct gm_record *r, void *unused) {
    (void)unused;
    r->references++;
}
/* Call it after the driver's call that released a handle or freed a pointer in a block. Releases the charge if this was the last reference;
 * if the driver refused, restores the record. */
static void unreferenced(CUresult r, enum gm_record_type type, uint64_t key, bool is_last, const struct gm_record *last) {
    if (r == CUDA_SUCCESS && is_last) gm_release(last->gpu, last->kind, last->bytes);
    else if (r != CUDA_SUCCESS && is_last) gm_record_add(*last);
    else if (r != CUDA_SUCCESS) gm_record_change(type, key, reference, NULL);
}

/* -- pointers and arrays ------------------------------------------------------------------------------------------------------
 * The driver takes whole blocks of 2 MiB: an H200 used 4 MiB for each cuMemAlloc of 3,145,729 bytes. Requests below 2 MiB share
 * blocks, and the driver keeps a block until the last pointer into it is freed. So each block, known by address, GPU, kind and context, is
 * charged once for all its pointers: a program with many small tensors does not pay 2 MiB for each, and a program that frees all but a few
 * bytes of each block still pays for the blocks. A request that would fit into a charged block is refused if less than 2 MiB are left,
 * because its place is known only after the driver's call. */

/* Keeps the reservation under the new handle, or gives it back. `shares`: the memory may be in a block that is charged already. */
static CUresult keep(CUresult r, int gpu, enum gm_kind kind, uint64_t bytes, bool shares, uint64_t key) {
    if (r != CUDA_SUCCESS || gpu < 0) {
        gm_release(gpu, kind, bytes);
        return r;
    }
    struct gm_record own = {.key = key, .bytes = bytes, .type = GM_POINTER, .kind = kind, .gpu = gpu, .owner = current_context()};
    if (shares) {
        struct gm_record block = own;
        own.block = mixed(mixed(mixed(key / BLOCK, (uint64_t)gpu), kind), (uint64_t)own.owner), own.bytes = 0;
        block.key = own.block, block.type = GM_BLOCK, block.references = 1;
        if (!gm_record_hold(block)) gm_release(gpu, kind, bytes);
    }
    gm_record_add(own);
    return r;
}
/* `call` allocates `size` bytes and stores their handle in `out`. */
#define ALLOCATE(kind, size, out, call)                                                                                            \
    do {                                                                                                                           \
        int gpu = (out) ? gm_current_gpu() : -1;                                                                                      \
        uint64_t asked = gpu < 0 ? 0 : (size), bytes = kind == GM_ARRAY ? asked : rounded(asked, BLOCK);                           \
        if (!reserve(gpu, kind, bytes)) return refuse(gpu);                                                                        \
        CUresult result = call;                                                                                                    \
        return keep(result, gpu, kind, bytes, kind != GM_ARRAY && asked < BLOCK, result == CUDA_SUCCESS ? (uint64_t)*(out) : 0);   \
    } while (0)
static void freed(const struct gm_record *record) {
    gm_release(record->gpu, record->kind, record->bytes);
    if (record->kind == GM_ARRAY && !record->bytes) gm_records_end((void *)record->key); /* what is mapped into it, if it is sparse */
}
/* The record is removed before the driver's call, since afterwards another thread may get the same address. */
#define FREE(key, call)                                                                                                            \
    do {                                                                                                                           \
        struct gm_record record, block;                                                                                            \
        bool known = gm_record_take(GM_POINTER, key, &record);                                                                     \
        bool is_last = known && record.block && gm_record_unreference(GM_BLOCK, record.block, &block);                             \
        CUresult result = call;                                                                                                    \
        if (known && record.block) unreferenced(result, GM_BLOCK, record.block, is_last, &block);                                  \
        if (known && result != CUDA_SUCCESS) gm_record_add(record);                                                                \
        else if (known) freed(&record);                                                                                            \
        return result;                                                                                                             \
    } while (0)

GM_WRAPPER(cuMemAlloc, (uint *at, uint n)) { ALLOCATE(GM_ALLOC, n, at, CALL(cuMemAlloc, at, n)); }
GM_WRAPPER(cuMemAlloc_v2, (CUdeviceptr *at, size_t n)) { ALLOCATE(GM_ALLOC, n, at, CALL(cuMemAlloc_v2, at, n)); }
GM_WRAPPER(cuMemAllocManaged, (CUdeviceptr *at, size_t n, uint flags)) {
    ALLOCATE(GM_MANAGED, n, at, CALL(cuMemAllocManaged, at, n, flags));
}
/* The driver chooses the length of a row: a multiple of 512 bytes on all GPUs so far. */
GM_WRAPPER(cuMemAllocPitch, (uint *at, uint *pitch, uint width, uint height, uint element)) {
    ALLOCATE(GM_ALLOC, times(rounded(width, 512), height), at, CALL(cuMemAllocPitch, at, pitch, width, height, element));
}
GM_WRAPPER(cuMemAllocPitch_v2, (CUdeviceptr *at, size_t *pitch, size_t width, size_t height, uint element)) {
    ALLOCATE(GM_ALLOC, times(rounded(width, 512), height), at, CALL(cuMemAllocPitch_v2, at, pitch, width, height, element));
}
GM_WRAPPER(cuMemFree, (uint at)) { FREE(at, CALL(cuMemFree, at)); }
GM_WRAPPER(cuMemFree_v2, (CUdeviceptr at)) { FREE(at, CALL(cuMemFree_v2, at)); }

/* cuMemFreeAsync of memory from no pool: the driver frees the memory when the stream gets to the call. It stays charged until then. */
/* With more pending frees than this, gm_frees_settle runs at the next free. It reads all records, so the bound grows with them. */
static atomic_int most_frees;
void gm_frees_settle(void) {
    int n = atomic_load(&gm_records_freed);
    struct gm_record *list = n ? malloc((size_t)n * sizeof *list) : NULL, gone, block;
    for (int i = list ? gm_records_list(GM_FREED, list, n) : 0; i-- > 0;) {
        if (!gm_passed(list[i].after) || !gm_record_take(GM_FREED, list[i].key, &gone)) continue;
        if (!gone.block) gm_release(gone.gpu, gone.kind, gone.bytes);
        else if (gm_record_unreference(GM_BLOCK, gone.block, &block)) gm_release(block.gpu, block.kind, block.bytes);
    }
    free(list);
    atomic_store(&most_frees, 2 * atomic_load(&gm_records_freed) + 64 + atomic_load(&gm_records) / 32);
}
static void freed_later(struct gm_record record, CUstream stream, bool per_thread) {
    static _Atomic(uint64_t) number;
    if (record.pool) return;
    record.key = atomic_fetch_add(&number, 1), record.type = GM_FREED, record.after = gm_point_in(stream, per_thread);
    gm_record_add(record);
    if (atomic_load(&gm_records_freed) > atomic_load(&most_frees)) gm_frees_settle();
}
#define FREE_ASYNC(symbol, per_thread)                                                                                             \
    GM_WRAPPER(symbol, (CUdeviceptr at, CUstream stream)) {                                                                        \
        struct gm_record record;                                                                                                   \
        bool known = gm_record_take(GM_POINTER, at, &record);                                                                      \
        CUresult result = CALL(symbol, at, stream);                                                                                \
        if (known && result != CUDA_SUCCESS) gm_record_add(record);                                                                \
        else if (known) freed_later(record, stream, per_thread);                                                                   \
        return result;                                                                                                             \
    }
FREE_ASYNC(cuMemFreeAsync, false) FREE_ASYNC(cuMemFreeAsync_ptsz, true)

/* The bits of an array's element: bits of a channel times channels, except for formats that name their channels. */
static uint64_t element_bits(int format, uint channels) {
    static const struct { int first, last; uint64_t bits; bool whole; } formats[] = {
        {0x01, 0x01, 8, false}, {0x02, 0x02, 16, false}, {0x03, 0x03, 32, false}, {0x08, 0x08, 8, false}, {0x09, 0x09, 16, false},
        {0x0a, 0x0a, 32, false}, {0x10, 0x10, 16, false}, {0x20, 0x20, 32, false}, {0x50, 0x50, 32, true}, {0xc0, 0xc0, 8, true},
        {0xc1, 0xc1, 16, true}, {0xc2, 0xc2, 32, true}, {0xc3, 0xc3, 16, true}, {0xc4, 0xc4, 32, true}, {0xc5, 0xc5, 64, true},
        {0xc6, 0xc6, 8, true}, {0xc7, 0xc7, 16, true}, {0xc8, 0xc8, 32, true}, {0xc9, 0xc9, 16, true}, {0xca, 0xca, 32, true},
        {0xcb, 0xcb, 64, true}, {0x91, 0x92, 4, true}, {0x97, 0x98, 4, true}, {0x93, 0x96, 8, true}, {0x99, 0x9e, 8, true},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (format >= formats[i].first && format <= formats[i].last) return formats[i].bits * (formats[i].whole ? 1 : channels);
    return 64; /* planar video formats need less */
}
/* The rows that an array's tiles take: the next power of two from 8 up to 128, above that the next multiple of 128. */
static uint64_t tiled(uint64_t rows) {
    uint64_t tile = 8;
    while (tile < 128 && tile < rows) tile *= 2;
    return rounded(rows, tile);
}
/* The driver reports the size only of arrays without memory of their own, so the size is computed as measured on an H200: rows in steps of
 * 64 bytes, tiles of 8 to 128 rows (even for one row), with a depth also of 4 slices; the sum in blocks of 2 MiB. Arrays of up to 1 MiB
 * share blocks: each is charged its part of a block that is full of such arrays, in steps of 64 KiB. If the driver takes more (on other
 * GPUs, or since a block is partly used), the agent finds the difference by the driver's figures (uncounted_bytes). */
static uint64_t array_bytes(const struct array3 *a, uint levels) {
    if (!a || a->flags & (SPARSE | DEFERRED)) return 0;
    uint64_t sum = 0;
    bool layered = a->flags & (LAYERED | CUBE);
    for (uint i = 0; i < levels && i < 32; i++) {
        uint64_t width = a->width >> i, height = a->height >> i, depth = layered ? a->depth : a->depth >> i;
        uint64_t row = rounded(rounded(times(width ? width : 1, element_bits(a->format, a->channels)), 8) / 8, 64);
        if (!layered) depth = depth > 2 ? rounded(depth, 4) : depth;
        uint64_t level = times(times(row, tiled(height ? height : 1)), depth ? depth : 1);
        if (__builtin_add_overflow(sum, level, &sum)) return UINT64_MAX;
        if (!(width | height | (layered ? 0 : depth))) break;
    }
    if (sum > BLOCK / 2) return rounded(sum, BLOCK);
    return BLOCK / (BLOCK / rounded(sum ? sum : 1, 65536));
}
#define WIDE2(a) (a) ? &(struct array3){(a)->width, (a)->height, 0, (a)->format, (a)->channels, 0} : NULL
#define WIDE3(a) (a) ? &(struct array3){(a)->width, (a)->height, (a)->depth, (a)->format, (a)->channels, (a)->flags} : NULL
GM_WRAPPER(cuArrayCreate, (CUarray *out, const struct array2_v1 *a)) {
    ALLOCATE(GM_ARRAY, array_bytes(WIDE2(a), 1), out, CALL(cuArrayCreate, out, a));
}
GM_WRAPPER(cuArrayCreate_v2, (CUarray *out, const struct array2 *a)) {
    ALLOCATE(GM_ARRAY, array_bytes(WIDE2(a), 1), out, CALL(cuArrayCreate_v2, out, a));
}
GM_WRAPPER(cuArray3DCreate, (CUarray *out, const struct array3_v1 *a)) {
    ALLOCATE(GM_ARRAY, array_bytes(WIDE3(a), 1), out, CALL(cuArray3DCreate, out, a));
}
GM_WRAPPER(cuArray3DCreate_v2, (CUarray *out, const struct array3 *a)) {
    ALLOCATE(GM_ARRAY, array_bytes(a, 1), out, CALL(cuArray3DCreate_v2, out, a));
}
GM_WRAPPER(cuMipmappedArrayCreate, (CUarray *out, const struct array3 *a, uint levels)) {
    ALLOCATE(GM_ARRAY, array_bytes(a, levels), out, CALL(cuMipmappedArrayCreate, out, a, levels));
}
GM_WRAPPER(cuArrayDestroy, (CUarray a)) { FREE((uint64_t)a, CALL(cuArrayDestroy, a)); }
GM_WRAPPER(cuMipmappedArrayDestroy, (CUarray a)) { FREE((uint64_t)a, CALL(cuMipmappedArrayDestroy, a)); }

/* -- virtual memory: a handle is charged until its last reference and its last mapping are gone -------------------------------- */
GM_WRAPPER(cuMemCreate, (CUdeviceptr *handle, size_t n, const struct allocation_properties *p, unsigned long long flags)) {
    int gpu = handle && p && gm_process() ? gm_gpu_of_device(device_at(p->where)) : -1;
    uint64_t bytes = gpu < 0 ? 0 : n;
    if (!reserve(gpu, GM_VMM, bytes)) return refuse(gpu);
    CUresult r = CALL(cuMemCreate, handle, n, p, flags);
    if (r != CUDA_SUCCESS) gm_release(gpu, GM_VMM, bytes);
    else if (gpu >= 0)
        gm_record_add((struct gm_record){.key = *handle, .bytes = bytes, .type = GM_HANDLE, .kind = GM_VMM, .gpu = gpu, .references = 1});
    return r;
}
/* As in FREE, before the driver's call. */
GM_WRAPPER(cuMemRelease, (CUdeviceptr handle)) {
    struct gm_record last;
    bool is_last = gm_record_unreference(GM_HANDLE, handle, &last);
    CUresult r = CALL(cuMemRelease, handle);
    unreferenced(r, GM_HANDLE, handle, is_last, &last);
    return r;
}
GM_WRAPPER(cuMemRetainAllocationHandle, (CUdeviceptr *handle, void *at)) {
    CUresult r = CALL(cuMemRetainAllocationHandle, handle, at);
    if (r == CUDA_SUCCESS) gm_record_change(GM_HANDLE, *handle, reference, NULL);
    return r;
}
/* An imported handle is charged to its maker. If that is this process, the import is one more reference. */
GM_WRAPPER(cuMemImportFromShareableHandle, (CUdeviceptr *handle, void *shared, int type)) {
    CUresult r = CALL(cuMemImportFromShareableHandle, handle, shared, type);
    if (r == CUDA_SUCCESS) gm_record_change(GM_HANDLE, *handle, reference, NULL);
    return r;
}
GM_WRAPPER(cuMemMap, (CUdeviceptr at, size_t n, size_t offset, CUdeviceptr handle, unsigned long long flags)) {
    CUresult r = CALL(cuMemMap, at, n, offset, handle, flags);
    if (r == CUDA_SUCCESS) gm_record_map(at, n, handle, NULL);
    return r;
}
GM_WRAPPER(cuMemUnmap, (CUdeviceptr at, size_t n)) {
    CUresult r = CALL(cuMemUnmap, at, n);
    if (r == CUDA_SUCCESS) gm_record_unmap(at, n);
    return r;
}
/* CUarrayMapInfo: parts of sparse arrays. Operations: 1 maps memory, 2 unmaps it. */
struct array_map { int type; void *array; int part_type; uint64_t part[4]; int operation, handle_type; CUdeviceptr handle; uint64_t rest[3]; };
static CUresult arrays_mapped(CUresult r, const struct array_map *list, uint n) {
    for (const struct array_map *m = list; r == CUDA_SUCCESS && m < list + n; m++) {
        uint64_t key = (uint64_t)m->array;
        for (int i = 0; i < 4; i++) key = mixed(key, m->part[i]); /* identifies the part, as an address identifies a range */
        gm_record_unmap(key, 1);
        if (m->operation == 1) gm_record_map(key, 1, m->handle, m->array);
    }
    return r;
}
#define MAP_ARRAYS(symbol)                                                                                                         \
    GM_WRAPPER(symbol, (struct array_map *list, uint n, CUstream stream)) { return arrays_mapped(CALL(symbol, list, n, stream), list, n); }
MAP_ARRAYS(cuMemMapArrayAsync) MAP_ARRAYS(cuMemMapArrayAsync_ptsz)

/* -- pools: the charge of each is what the driver reserved for it -------------------------------------------------------------- */
enum { RESERVED_CURRENT = 5, POOLS = 256 }; /* CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT */
typedef void *pool_t;
static uint64_t pool_bytes(pool_t pool) {
    uint64_t bytes = UINT64_MAX;
    int mode = gm_relax();
    CUresult r = ASK(cuMemPoolGetAttribute, (pool_t, int, void *), pool, RESERVED_CURRENT, &bytes);
    gm_unrelax(mode);
    return r == CUDA_SUCCESS ? bytes : UINT64_MAX;
}
static void copy(struct gm_record *r, void *out) { *(struct gm_record *)out = *r; }
/* Charges what the pool has, unless another thread has charged since `now` was copied; then that thread's figure may be the later one. */
static void recharge(struct gm_record *r, void *now) {
    struct gm_record *wanted = now;
    uint64_t old = r->bytes;
    if (r->size != wanted->size) return; /* a pool's `size` counts its charges */
    r->bytes = wanted->bytes, r->size++, wanted->key = 0;
    if (r->bytes > old) gm_charge(r->gpu, r->kind, r->bytes - old);
    else gm_release(r->gpu, r->kind, old - r->bytes);
}
static void pool_settle(pool_t pool) {
    struct gm_record now = {.key = 1};
    while (now.key && gm_record_change(GM_POOL_OF, (uint64_t)pool, copy, &now) && (now.bytes = pool_bytes(pool)) != UINT64_MAX)
        gm_record_change(GM_POOL_OF, (uint64_t)pool, recharge, &now);
}
void gm_memory_settle(bool trim) {
    struct gm_record pools[POOLS];
    int n = gm_process() ? gm_records_list(GM_POOL_OF, pools, POOLS) : 0;
    for (int i = 0; i < n; i++) {
        int mode = gm_relax();
        if (trim) ASK(cuMemPoolTrimTo, (pool_t, size_t), (pool_t)pools[i].key, 0);
        gm_unrelax(mode);
        pool_settle((pool_t)pools[i].key);
    }
    gm_frees_settle();
}
/* The index of the pool's GPU; -1: the GPU is not limited, or another process made the pool. A device's default pool is recorded at its
 * first use. */
static int pool_gpu(pool_t pool) {
    struct gm_record known;
    int gpu = -1, count = 0;
    if (gm_record_change(GM_POOL_OF, (uint64_t)pool, copy, &known)) return known.gpu;
    if (ASK(cuDeviceGetCount, (int *), &count) != CUDA_SUCCESS) return -1;
    for (CUdevice d = 0; d < count; d++) {
        pool_t found = NULL;
        if (ASK(cuDeviceGetDefaultMemPool, (pool_t *, CUdevice), &found, d) != CUDA_SUCCESS || found != pool) continue;
        gpu = gm_gpu_of_device(d);
        if (gpu >= 0) gm_record_add((struct gm_record){.key = (uint64_t)pool, .type = GM_POOL_OF, .kind = GM_POOL, .gpu = gpu, .references = 1});
    }
    return gpu;
}
/* Records a pointer from a pool that the program can destroy. A device's default pool can't be destroyed; its record has a reference. */
static void remember(pool_t pool, uint64_t at, uint64_t size) {
    struct gm_record from;
    if (gm_record_change(GM_POOL_OF, (uint64_t)pool, copy, &from) && !from.references)
        gm_record_add((struct gm_record){.key = at, .size = size, .pool = from.key, .type = GM_POINTER, .kind = GM_POOL, .gpu = from.gpu});
}
static uint64_t graph_devices; /* bit n: this process has put allocations of device n into graphs */
static void into_graph(CUdevice d) {
    if (d >= 0 && d < 64) __atomic_fetch_or(&graph_devices, 1ull << d, __ATOMIC_RELAXED);
}
static CUdevice device_of(CUstream stream) {
    CUdevice d = gm_current_device();
    if ((uintptr_t)stream > 2) ASK(cuStreamGetDevice, (CUstream, CUdevice *), stream, &d);
    return d;
}
static bool capturing(CUstream stream, bool per_thread) {
    bool captures = gm_stream_captures(stream, per_thread);
    if (captures) into_graph(device_of(stream));
    return captures;
}
/* The pool of the stream's device. */
static pool_t pool_of(CUstream stream) {
    CUdevice d = device_of(stream);
    pool_t pool = NULL;
    return d >= 0 && ASK(cuDeviceGetMemPool, (pool_t *, CUdevice), &pool, d) == CUDA_SUCCESS ? pool : NULL;
}
/* Reserves the request, rounded up to steps of the pool's growth; after the driver's call, charges the pool's real growth instead. Whether
 * the pool has unused memory for the request is not known before the call. So if less than a step is left, the request is refused although
 * up to a step of the pool may be unused. */
#define FROM_POOL(out, size, pool, stream, per_thread, call)                                                                       \
    do {                                                                                                                           \
        pool_t from = (out) && gm_process() && !capturing(stream, per_thread) ? (pool) : NULL;                                     \
        int gpu = from ? pool_gpu(from) : -1;                                                                                      \
        uint64_t bytes = gpu < 0 ? 0 : rounded(size, POOL_STEP);                                                                   \
        if (bytes && !reserve(gpu, GM_POOL, bytes)) return refuse(gpu);                                                            \
        CUresult result = call;                                                                                                    \
        if (gpu >= 0 && result == CUDA_SUCCESS) remember(from, *(out), size);                                                      \
        if (gpu >= 0) pool_settle(from);                                                                                           \
        gm_release(gpu, GM_POOL, bytes);                                                                                           \
        return result;                                                                                                             \
    } while (0)
#define ALLOC_ASYNC(symbol, per_thread)                                                                                            \
    GM_WRAPPER(symbol, (CUdeviceptr *at, size_t n, CUstream stream)) {                                                             \
        FROM_POOL(at, n, pool_of(stream), stream, per_thread, CALL(symbol, at, n, stream));                            \
    }
#define ALLOC_FROM_POOL(symbol, per_thread)                                                                                        \
    GM_WRAPPER(symbol, (CUdeviceptr *at, size_t n, pool_t pool, CUstream stream)) {                                                \
        FROM_POOL(at, n, pool, stream, per_thread, CALL(symbol, at, n, pool, stream));                                             \
    }
ALLOC_ASYNC(cuMemAllocAsync, false) ALLOC_ASYNC(cuMemAllocAsync_ptsz, true)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, false) ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, true)
/* A pool of managed memory (type 2) that is on no device counts as the current device's. */
static void pool_known(pool_t pool, location where, int type, int references) {
    struct gm_record known;
    if (!gm_process() || gm_record_change(GM_POOL_OF, (uint64_t)pool, copy, &known)) return;
    int gpu = device_at(where) >= 0 ? gm_gpu_of_device(device_at(where)) : type == 2 ? gm_current_gpu() : -1;
    if (gpu >= 0) gm_record_add((struct gm_record){.key = (uint64_t)pool, .type = GM_POOL_OF, .kind = GM_POOL, .gpu = gpu, .references = references});
}
GM_WRAPPER(cuMemPoolCreate, (pool_t *pool, const struct pool_properties *p)) {
    CUresult r = CALL(cuMemPoolCreate, pool, p);
    if (r == CUDA_SUCCESS) pool_known(*pool, p->where, p->type, 0);
    return r;
}
#define POOL_AT(symbol)                                                                                                            \
    GM_WRAPPER(symbol, (pool_t *pool, location *where, int type)) {                                                                \
        CUresult r = CALL(symbol, pool, where, type);                                                                              \
        if (r == CUDA_SUCCESS) pool_known(*pool, *where, type, 1);                                                                 \
        return r;                                                                                                                  \
    }
POOL_AT(cuMemGetDefaultMemPool) POOL_AT(cuMemGetMemPool)
GM_WRAPPER(cuMemPoolDestroy, (pool_t pool)) {
    struct gm_record record;
    bool known = gm_record_take(GM_POOL_OF, (uint64_t)pool, &record);
    CUresult r = CALL(cuMemPoolDestroy, pool);
    if (known && r != CUDA_SUCCESS) gm_record_add(record);
    else if (known) gm_records_outlive((uint64_t)pool), gm_release(record.gpu, record.kind, record.bytes);
    return r;
}
GM_WRAPPER(cuMemPoolTrimTo, (pool_t pool, size_t keep)) {
    CUresult r = CALL(cuMemPoolTrimTo, pool, keep);
    pool_settle(pool);
    return r;
}

/* -- memory of graphs: known only after it was taken ---------------------------------------------------------------------------- *
 * The driver reports a graph's memory only after it has taken it, at instantiation, upload or launch. So a graph may exceed the limit; then
 * all later requests are refused until the container is within its limit again. */
enum { GRAPH_RESERVED_CURRENT = 2 }; /* CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT */
void gm_graph_memory(void) {
    static uint64_t charged[64];
    uint64_t devices = __atomic_load_n(&graph_devices, __ATOMIC_RELAXED);
    if (!devices || !gm_process()) return;
    for (CUdevice d = 0; d < 64 && devices >> d; d++) {
        int gpu = devices >> d & 1 ? gm_gpu_of_device(d) : -1;
        uint64_t bytes = 0;
        CUresult r = gpu < 0 ? CUDA_SUCCESS : ASK(cuDeviceGetGraphMemAttribute, (CUdevice, int, void *), d, GRAPH_RESERVED_CURRENT, &bytes);
        if (gpu < 0 || r != CUDA_SUCCESS) continue;
        uint64_t old = __atomic_exchange_n(&charged[d], bytes, __ATOMIC_SEQ_CST);
        if (bytes > old) gm_charge(gpu, GM_GRAPH, bytes - old);
        else gm_release(gpu, GM_GRAPH, old - bytes);
    }
}
static CUresult graph(CUresult r) {
    if (r == CUDA_SUCCESS) gm_graph_memory();
    return r;
}
GM_WRAPPER(cuGraphAddMemAllocNode, (void **node, CUgraph g, const void *after, size_t n, struct pool_properties *parameters)) {
    if (parameters) into_graph(device_at(parameters->where));
    return CALL(cuGraphAddMemAllocNode, node, g, after, n, parameters);
}
struct node { int type, reserved[3]; struct pool_properties pool; };
static void node_into_graph(const struct node *x) {
    if (x && x->type == 10) into_graph(device_at(x->pool.where)); /* CU_GRAPH_NODE_TYPE_MEM_ALLOC */
}
GM_WRAPPER(cuGraphAddNode, (void **node, CUgraph g, const void *after, size_t n, struct node *parameters)) {
    node_into_graph(parameters);
    return CALL(cuGraphAddNode, node, g, after, n, parameters);
}
#define ADD_NODE(symbol)                                                                                                           \
    GM_WRAPPER(symbol, (void **node, CUgraph g, const void *after, const void *edges, size_t n, struct node *parameters)) {        \
        node_into_graph(parameters);                                                                                               \
        return CALL(symbol, node, g, after, edges, n, parameters);                                                                 \
    }
ADD_NODE(cuGraphAddNode_v2) ADD_NODE(cuGraphAddNode_v3)
#define GRAPH(symbol, parameters, ...) GM_WRAPPER(symbol, parameters) { return graph(CALL(symbol, __VA_ARGS__)); }
GRAPH(cuGraphInstantiate, (CUgraphExec *out, CUgraph g, void **node, char *log, size_t n), out, g, node, log, n)
GRAPH(cuGraphInstantiate_v2, (CUgraphExec *out, CUgraph g, void **node, char *log, size_t n), out, g, node, log, n)
GRAPH(cuGraphInstantiateWithFlags, (CUgraphExec *out, CUgraph g, unsigned long long flags), out, g, flags)
GRAPH(cuGraphInstantiateWithParams, (CUgraphExec *out, CUgraph g, void *parameters), out, g, parameters)
GRAPH(cuGraphInstantiateWithParams_ptsz, (CUgraphExec *out, CUgraph g, void *parameters), out, g, parameters)
GRAPH(cuGraphUpload, (CUgraphExec g, CUstream stream), g, stream)
GRAPH(cuGraphUpload_ptsz, (CUgraphExec g, CUstream stream), g, stream)
GRAPH(cuDeviceGraphMemTrim, (CUdevice d), d)

/* -- contexts: each costs what the agent measured on this GPU ------------------------------------------------------------------- */
static uint64_t context_bytes(int gpu) { return gpu < 0 ? 0 : gm_process()->limits->gpu[gpu].context_bytes; }
#define CREATE_CONTEXT(out, device, call)                                                                                          \
    do {                                                                                                                           \
        int gpu = (out) && gm_process() ? gm_gpu_of_device(device) : -1;                                                           \
        uint64_t bytes = context_bytes(gpu);                                                                                       \
        if (!reserve(gpu, GM_CONTEXT, bytes)) return refuse(gpu);                                                                  \
        CUresult result = call;                                                                                                    \
        if (result != CUDA_SUCCESS) gm_release(gpu, GM_CONTEXT, bytes);                                                            \
        else if (gpu >= 0)                                                                                                         \
            gm_record_add((struct gm_record){                                                                                      \
                .key = (uint64_t)*(out), .bytes = bytes, .type = GM_OWN_CONTEXT, .kind = GM_CONTEXT, .gpu = gpu, .owner = *(out)}); \
        return result;                                                                                                             \
    } while (0)
GM_WRAPPER(cuCtxCreate, (CUcontext *c, uint flags, CUdevice d)) { CREATE_CONTEXT(c, d, CALL(cuCtxCreate, c, flags, d)); }
GM_WRAPPER(cuCtxCreate_v2, (CUcontext *c, uint flags, CUdevice d)) { CREATE_CONTEXT(c, d, CALL(cuCtxCreate_v2, c, flags, d)); }
GM_WRAPPER(cuCtxCreate_v3, (CUcontext *c, void *affinity, int n, uint flags, CUdevice d)) {
    CREATE_CONTEXT(c, d, CALL(cuCtxCreate_v3, c, affinity, n, flags, d));
}
GM_WRAPPER(cuCtxCreate_v4, (CUcontext *c, void *parameters, uint flags, CUdevice d)) {
    CREATE_CONTEXT(c, d, CALL(cuCtxCreate_v4, c, parameters, flags, d));
}
void gm_memory_context_ended(CUcontext context) { gm_records_end(context); }

/* Primary contexts: the driver makes one at the first retain, and ends it at the last release or at a reset. */
static CUcontext primaries[64]; /* the charged ones */
static bool active(CUdevice d) {
    uint flags;
    int on = 0;
    return ASK(cuDevicePrimaryCtxGetState, (CUdevice, uint *, int *), d, &flags, &on) == CUDA_SUCCESS && on;
}
static atomic_int references[64]; /* the program's references to each; a reset sets them to 0 here, but not in the driver */
int gm_primary_references(CUdevice d, int change) {
    return d < 0 || d >= 64 ? 0 : atomic_fetch_add(&references[d], change) + change;
}
static CUcontext retained[64];
CUcontext gm_primary_context(CUdevice d) { return d < 0 || d >= 64 ? NULL : __atomic_load_n(&retained[d], __ATOMIC_ACQUIRE); }
GM_WRAPPER(cuDevicePrimaryCtxRetain, (CUcontext *c, CUdevice d)) {
    int gpu = c && d >= 0 && d < 64 && gm_process() ? gm_gpu_of_device(d) : -1;
    bool charged = gpu < 0 || __atomic_load_n(&primaries[d], __ATOMIC_ACQUIRE);
    uint64_t bytes = charged || active(d) ? 0 : context_bytes(gpu);
    if (!reserve(gpu, GM_CONTEXT, bytes)) return refuse(gpu);
    CUresult r = CALL(cuDevicePrimaryCtxRetain, c, d);
    if (r == CUDA_SUCCESS && gm_primary_references(d, 1)) __atomic_store_n(&retained[d], *c, __ATOMIC_RELEASE);
    if (charged) return r;
    CUcontext none = NULL;
    /* If several threads retain the context at the same time, only one keeps its charge. */
    if (r == CUDA_SUCCESS && __atomic_compare_exchange_n(&primaries[d], &none, *c, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        gm_record_add((struct gm_record){
            .key = (uint64_t)*c, .bytes = bytes, .type = GM_OWN_CONTEXT, .kind = GM_CONTEXT, .gpu = gpu, .owner = *c});
    else gm_release(gpu, GM_CONTEXT, bytes);
    return r;
}
void gm_memory_primary_changed(CUdevice d) {
    if (!gm_process() || d < 0 || d >= 64 || active(d)) return;
    atomic_store(&references[d], 0);
    gm_records_end(__atomic_exchange_n(&primaries[d], NULL, __ATOMIC_ACQ_REL));
    gm_memory_settle(false);
}
