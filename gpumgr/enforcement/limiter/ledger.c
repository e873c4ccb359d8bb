/* The count, in the use page, of the device memory that the container's processes have reserved.
 *
 * A request is reserved before the driver is asked, so two processes can't both get the last bytes. Any process may end between any
 * two instructions; the order of writes makes the count right afterwards:
 *   reserve: the slot's `pending` grows, `reserved_bytes` grows by compare-and-swap, the slot's `bytes` grow, `pending` shrinks
 *   release: `reserved_bytes` shrinks, then the slot's `bytes` shrink
 * So the sum of bytes and pending bytes of all slots is never less than what is in use, and gm_ledger_settle may lower `reserved_bytes` to
 * that sum once the slots of dead processes are empty. gm_ledger_settle does nothing if a change was counted while it read the slots. */
#include "memory.h"

#define PENDING reserved[0] /* of gm_use_slot_gpu */
#define CHANGES reserved[0] /* of gm_use_gpu */
#define NO_LIMIT (1ull << 50) /* memory without a limit is counted, too; so small that no sum overflows */

static uint64_t load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void add(uint64_t *p, uint64_t n) { __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST); }
static void subtract(uint64_t *p, uint64_t n) { __atomic_fetch_sub(p, n, __ATOMIC_SEQ_CST); }

uint64_t gm_memory_limit(int gpu) {
    struct gm_process *p = gpu < 0 ? NULL : gm_process();
    return p ? load(&p->limits->gpu[gpu].memory_bytes) : 0;
}

uint64_t gm_memory_used(int gpu) {
    struct gm_process *p = gm_process();
    uint64_t sum = 0;
    if (!p || __builtin_add_overflow(load(&p->use->gpu[gpu].reserved_bytes), load(&p->limits->gpu[gpu].uncounted_bytes), &sum))
        return p ? UINT64_MAX : 0;
    return sum;
}

/* Reserves the request if it fits; returns whether it does. */
static bool reserve(struct gm_process *p, int gpu, uint64_t bytes, uint64_t limit) {
    struct gm_use_gpu *total = &p->use->gpu[gpu];
    uint64_t seen = load(&total->reserved_bytes);
    for (;;) {
        uint64_t other = load(&p->limits->gpu[gpu].uncounted_bytes), used;
        if (__builtin_add_overflow(seen, other, &used) || used > limit || bytes > limit - used) return false;
        add(&total->CHANGES, 1);
        if (__atomic_compare_exchange_n(&total->reserved_bytes, &seen, seen + bytes, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    }
}

void gm_ledger_settle(int gpu) {
    struct gm_process *p = gm_process();
    if (!p) return;
    struct gm_use_gpu *total = &p->use->gpu[gpu];
    uint64_t changes = load(&total->CHANGES), seen = load(&total->reserved_bytes), sum = 0;
    for (int i = 0; i < gm_slots(); i++) {
        if (!load((const uint64_t *)&p->use->slot[i])) continue; /* no pid, no state */
        struct gm_use_slot_gpu *s = &p->use->slot[i].gpu[gpu];
        sum += load(&s->PENDING);
        for (int kind = 0; kind < GM_KINDS; kind++) sum += load(&s->bytes[kind]);
    }
    if (sum < seen && load(&total->CHANGES) == changes)
        __atomic_compare_exchange_n(&total->reserved_bytes, &seen, sum, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Reserves with the slot's part of the count. A request that does not fit leaves no pending bytes, which other processes would count. */
static bool reserve_in_slot(struct gm_process *p, int gpu, enum gm_kind kind, uint64_t bytes, uint64_t limit) {
    struct gm_use_slot_gpu *own = &p->slot->gpu[gpu];
    add(&own->PENDING, bytes);
    bool fits = reserve(p, gpu, bytes, limit);
    if (fits) add(&own->bytes[kind], bytes);
    subtract(&own->PENDING, bytes);
    return fits;
}

bool gm_reserve(int gpu, enum gm_kind kind, uint64_t bytes) {
    struct gm_process *p = gpu < 0 ? NULL : gm_process();
    uint64_t limit = gm_memory_limit(gpu);
    if (!p || !bytes) return true;
    if (!p->slot) return !limit; /* the memory of a process without a slot could not be freed at its death, so it gets none */
    if (!limit) limit = NO_LIMIT;
    if (bytes > limit) return false;
    if (reserve_in_slot(p, gpu, kind, bytes, limit)) return true;
    gm_reap_slots();
    gm_ledger_settle(gpu);
    return reserve_in_slot(p, gpu, kind, bytes, limit);
}

void gm_refused(int gpu) {
    struct gm_process *p = gm_process();
    if (p) add(&p->use->gpu[gpu].refused, 1);
}

void gm_charge(int gpu, enum gm_kind kind, uint64_t bytes) {
    struct gm_process *p = gpu < 0 ? NULL : gm_process();
    if (!p || !p->slot || !bytes) return;
    add(&p->slot->gpu[gpu].PENDING, bytes);
    add(&p->use->gpu[gpu].CHANGES, 1);
    add(&p->use->gpu[gpu].reserved_bytes, bytes);
    add(&p->slot->gpu[gpu].bytes[kind], bytes);
    subtract(&p->slot->gpu[gpu].PENDING, bytes);
}

void gm_release(int gpu, enum gm_kind kind, uint64_t bytes) {
    struct gm_process *p = gpu < 0 ? NULL : gm_process();
    if (!p || !p->slot || !bytes) return;
    uint64_t *total = &p->use->gpu[gpu].reserved_bytes, *own = &p->slot->gpu[gpu].bytes[kind], seen = load(total);
    add(&p->use->gpu[gpu].CHANGES, 1);
    /* Never below zero: the container may have changed its page. */
    while (!__atomic_compare_exchange_n(total, &seen, seen > bytes ? seen - bytes : 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    uint64_t mine = load(own);
    while (!__atomic_compare_exchange_n(own, &mine, mine > bytes ? mine - bytes : 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
}
