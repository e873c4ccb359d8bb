/* What each pointer and handle of this process holds. The lock is never held over a call of the driver. */
#include "memory.h"
#include "old_glibc.h"
#include <pthread.h>
#include <stdlib.h>

enum { BUCKETS = 4096 };
static struct gm_record *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
atomic_int gm_records, gm_records_freed;

/* A child after fork has no CUDA; its parent's charges are not its own. */
static void forget(void) {
    pthread_mutex_init(&lock, NULL);
    for (int i = 0; i < BUCKETS; i++) buckets[i] = NULL;
    atomic_store(&gm_records, 0), atomic_store(&gm_records_freed, 0);
}
static void at_fork(void) { pthread_atfork(NULL, NULL, forget); }

static struct gm_record **bucket(uint64_t key) { return &buckets[(key >> 9 ^ key >> 21 ^ key) % BUCKETS]; }

/* The place of a record. The driver may reuse the number of a handle that only mappings hold; then the handle with references is found. */
static struct gm_record **find(enum gm_record_type type, uint64_t key) {
    struct gm_record **second = NULL;
    for (struct gm_record **r = bucket(key); *r; r = &(*r)->next) {
        if ((*r)->key != key || (*r)->type != type) continue;
        if (type != GM_HANDLE || (*r)->references) return r;
        second = r;
    }
    return second;
}

static void insert(struct gm_record *r) {
    struct gm_record **b = bucket(r->key);
    r->next = *b;
    *b = r;
    atomic_fetch_add(&gm_records, 1), atomic_fetch_add(&gm_records_freed, r->type == GM_FREED);
}
static void removed(struct gm_record **at) {
    atomic_fetch_sub(&gm_records, 1), atomic_fetch_sub(&gm_records_freed, (*at)->type == GM_FREED);
    *at = (*at)->next;
}

void gm_record_add(struct gm_record value) {
    pthread_once(&once, at_fork);
    struct gm_record *r = malloc(sizeof *r);
    if (!r) return; /* then the memory stays charged until the process ends */
    *r = value;
    pthread_mutex_lock(&lock);
    insert(r);
    pthread_mutex_unlock(&lock);
}

bool gm_record_hold(struct gm_record block) {
    pthread_once(&once, at_fork);
    struct gm_record *r = malloc(sizeof *r); /* without memory the charge stays until the process ends */
    pthread_mutex_lock(&lock);
    struct gm_record **known = find(GM_BLOCK, block.key);
    if (known) (*known)->references++;
    else if (r) {
        *r = block;
        insert(r);
        r = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(r);
    return !known;
}

bool gm_record_take(enum gm_record_type type, uint64_t key, struct gm_record *out) {
    pthread_mutex_lock(&lock);
    struct gm_record **at = find(type, key), *r = at ? *at : NULL;
    if (r) removed(at);
    pthread_mutex_unlock(&lock);
    if (!r) return false;
    *out = *r;
    free(r);
    return true;
}

bool gm_record_change(enum gm_record_type type, uint64_t key, void (*change)(struct gm_record *, void *), void *argument) {
    pthread_mutex_lock(&lock);
    struct gm_record **at = find(type, key);
    if (at) change(*at, argument);
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* Removes the record of a handle or a block if neither a reference nor a mapping is left, and returns it; the caller releases its charge.
 * Call it with the lock held. */
static struct gm_record *unheld(struct gm_record *handle) {
    if (handle->references || handle->mappings) return NULL;
    for (struct gm_record **at = bucket(handle->key); *at; at = &(*at)->next)
        if (*at == handle) {
            removed(at);
            return handle;
        }
    return NULL;
}
/* The handle behind the mapping, if nothing else holds it any longer. Like unheld. */
static struct gm_record *unmapped(struct gm_record *mapping) {
    mapping->of->mappings--;
    return unheld(mapping->of);
}
static void credit(struct gm_record *r) {
    if (r) gm_release(r->gpu, r->kind, r->bytes);
    free(r);
}

void gm_records_end(void *owner) {
    struct gm_record *gone = NULL, *handle;
    if (!owner) return;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (struct gm_record **at = &buckets[i], *r; (r = *at);) {
            if (r->owner != owner) {
                at = &r->next;
                continue;
            }
            removed(at);
            r->next = gone;
            gone = r;
        }
    for (struct gm_record *r = gone; r; r = r->next)
        if (r->of && (handle = unmapped(r))) handle->next = gone, gone = handle;
    pthread_mutex_unlock(&lock);
    for (struct gm_record *r; (r = gone); credit(r)) {
        gone = r->next;
        if (r->kind == GM_ARRAY && !r->bytes) gm_records_end((void *)r->key); /* it may be sparse */
    }
}

bool gm_record_unreference(enum gm_record_type type, uint64_t key, struct gm_record *out) {
    pthread_mutex_lock(&lock);
    struct gm_record **at = find(type, key), *last = NULL;
    if (at && (*at)->references) {
        struct gm_record *r = *at;
        r->references--;
        last = unheld(r);
        if (last) *out = *last, out->references = 1;
    }
    pthread_mutex_unlock(&lock);
    free(last);
    return last != NULL;
}

void gm_records_outlive(uint64_t pool) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (struct gm_record *r = buckets[i]; r; r = r->next) {
            if (r->pool != pool) continue;
            r->pool = 0, r->bytes = r->size;
            gm_charge(r->gpu, r->kind, r->bytes);
        }
    pthread_mutex_unlock(&lock);
}

void gm_record_map(uint64_t at, uint64_t size, uint64_t handle, void *owner) {
    struct gm_record *r = malloc(sizeof *r);
    pthread_mutex_lock(&lock);
    struct gm_record **of = find(GM_HANDLE, handle);
    if (of && r) {
        (*of)->mappings++;
        *r = (struct gm_record){.key = at, .size = size, .type = GM_MAPPING, .gpu = -1, .owner = owner, .of = *of};
        insert(r);
        r = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(r);
}

void gm_record_unmap(uint64_t at, uint64_t size) {
    for (uint64_t end = at + size; at < end;) {
        pthread_mutex_lock(&lock);
        struct gm_record **place = find(GM_MAPPING, at), *mapping = place ? *place : NULL, *gone = NULL;
        if (mapping) {
            removed(place);
            gone = unmapped(mapping);
        }
        pthread_mutex_unlock(&lock);
        if (!mapping) break; /* the range was mapped to a handle without a record: an imported one */
        at += mapping->size;
        free(mapping);
        credit(gone);
    }
}

int gm_records_list(enum gm_record_type type, struct gm_record *out, int most) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS; i++)
        for (struct gm_record *r = buckets[i]; r; r = r->next)
            if (r->type == type && n < most) out[n++] = *r;
    pthread_mutex_unlock(&lock);
    return n;
}
