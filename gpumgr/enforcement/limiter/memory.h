/* What the parts of the memory limit offer each other: ledger.c counts, records.c knows what each handle holds, memory.c has the
 * wrappers of allocations, queries.c the wrappers that show the share. */
#ifndef GPUMGR_MEMORY_H
#define GPUMGR_MEMORY_H
#include "library.h"

/* -- the ledger; `gpu` is an index into the pages, -1 where the device is not limited ---------------------------------------- */
uint64_t gm_memory_limit(int gpu); /* 0: not limited */
uint64_t gm_memory_used(int gpu);  /* by the container, with what the driver uses beyond the count */
/* Reserves for this process; false: the request exceeds the limit, or there is a limit and the process has no slot. Memory without a limit
 * is counted, too. */
bool gm_reserve(int gpu, enum gm_kind kind, uint64_t bytes);
void gm_charge(int gpu, enum gm_kind kind, uint64_t bytes); /* counts what the driver already took, even beyond the limit */
void gm_release(int gpu, enum gm_kind kind, uint64_t bytes);
void gm_refused(int gpu); /* counts a request that the library has refused */
/* Lowers the sum to what the slots hold, after slots of dead processes were emptied. */
void gm_ledger_settle(int gpu);

/* -- records: what a pointer or a handle of this process holds ---------------------------------------------------------------- */
enum gm_record_type { GM_POINTER, GM_FREED, GM_BLOCK, GM_HANDLE, GM_MAPPING, GM_POOL_OF, GM_OWN_CONTEXT };
struct gm_record {
    uint64_t key, size; /* size: of a mapping's range, of a pointer from a pool; of a pool: how often its charge was changed */
    uint64_t bytes;     /* how much is charged for it */
    uint64_t block;     /* of a pointer: the key of the block that is charged instead; 0: none */
    uint64_t pool;      /* of a pointer: the pool that is charged instead, as long as it exists; 0: none */
    enum gm_record_type type;
    enum gm_kind kind;
    int gpu, references, mappings;
    void *owner;           /* the context or the sparse array with which it ends; NULL: none */
    struct gm_point after; /* of memory that the program has freed in a stream: the driver frees it at this point */
    struct gm_record *of;  /* the handle behind a mapping */
    struct gm_record *next;
};
void gm_record_add(struct gm_record value);
/* Removes a record; false: there is none. */
bool gm_record_take(enum gm_record_type type, uint64_t key, struct gm_record *out);
/* Calls `change` with the record, under the records' lock. False: there is none. */
bool gm_record_change(enum gm_record_type type, uint64_t key, void (*change)(struct gm_record *record, void *argument), void *argument);
/* Adds a reference for one more pointer in this block. True: it is the first, so the block is recorded with its charge. False: the block is
 * charged already, so the caller releases its own charge. */
bool gm_record_hold(struct gm_record block);
/* Removes the records of what ends with a context or a sparse array, and releases their charges. */
void gm_records_end(void *owner);
/* A pool was destroyed: the driver keeps the memory of pointers that were not freed, so each is charged for itself. */
void gm_records_outlive(uint64_t pool);
/* Virtual memory: a range, or a part of a sparse array (the owner), was mapped to a handle; ranges were unmapped. */
void gm_record_map(uint64_t at, uint64_t size, uint64_t handle, void *owner);
void gm_record_unmap(uint64_t at, uint64_t size);
/* Drops a reference to a handle or a block. True: it was the last and nothing is mapped, so the record was moved to `out`, and the caller
 * releases its charge. */
bool gm_record_unreference(enum gm_record_type type, uint64_t key, struct gm_record *out);
/* How many records there are, and how many of them are about memory that the driver has yet to free. */
extern atomic_int gm_records, gm_records_freed;
/* The first `most` records of a type. */
int gm_records_list(enum gm_record_type type, struct gm_record *out, int most);

/* -- for other parts ------------------------------------------------------------------------------------------------------------ */
/* After a graph was instantiated, uploaded or launched: charges the growth of the devices' memory for graphs. */
void gm_graph_memory(void);
/* After the driver destroyed a context, or released or reset a primary one. */
void gm_memory_context_ended(CUcontext context);
void gm_memory_primary_changed(CUdevice device);
/* The program's references to a primary context after `change`: not more than the driver has. */
int gm_primary_references(CUdevice device, int change);
/* The device's primary context, as the program last retained it; NULL: it has not. */
CUcontext gm_primary_context(CUdevice device);
/* Releases the charges of memory that the driver has freed since the program's cuMemFreeAsync. */
void gm_frees_settle(void);
/* Updates the charges of pools, and of memory that the driver frees later. `trim`: first makes pools give back what they don't use. */
void gm_memory_settle(bool trim);
#endif
