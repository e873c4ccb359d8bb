/* The arbiter: decides which tenant (a container on one GPU) holds each GPU. It is a shared library that the agent loads with ctypes; one
 * native thread serves the node.
 *
 * It reads and writes the tenants' pages with pread and pwrite. A mapping of the turn page is only the address of a futex: a tenant may
 * truncate its page at any time.
 *
 * A tenant's virtual time is the time that it held the GPU, divided by its share; the waiting tenant with the lowest one is next. Only
 * tenants that compete are compared. The virtual time of a tenant that comes back is raised nearly to the lowest of theirs, so a tenant
 * pays nothing later for the use of a free GPU. Each tenant has a token bucket of GPU time, which fills at the rate of its ceiling; while
 * the bucket is empty, the tenant waits although the GPU is free. */
#define _GNU_SOURCE
#include "pages.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MS 1000000ll
enum { TENANTS = 1024, GPUS = 64, NONE = -1 };
#define SCAN_NS (MS / 2)       /* between two looks at a GPU with an active tenant */
#define DRAIN_SCAN_NS 60000    /* between two looks while the work of an ended turn is about to end */
#define REST_SCAN_NS (5 * MS)  /* between two looks at a GPU without an active tenant */
#define REFRESH_NS (50 * MS)   /* between two reads of the limits pages, and two heartbeats */
#define RECENT_NS (1000 * MS)  /* how long a tenant stays active after it last wanted or had the GPU */
#define AWAY_NS (100 * MS)     /* how long after an overrun a tenant keeps its whole claim */
#define CROSSED_NS (5 * MS)    /* the time for the work of a holder that yields; what a program may queue ahead ends sooner */
#define DEBT_NS (2000 * MS)    /* the bounds of a debt, a claim and an overdrawn bucket */

/* -- what the agent calls ---------------------------------------------------------------------------------------------------------
 * int gm_arbiter_start(void)
 *     Starts the thread, with all signals blocked. 0, or an error number.
 * void gm_arbiter_stop(void)
 *     Ends it. 200 ms later the tenants limit themselves.
 * int gm_arbiter_add(int gpu, int page, int limits_fd, int turn_fd)
 *     Adds a tenant of one GPU; a container with several GPUs is added once for each. `gpu`: the caller's number of the GPU, 0 to 63;
 *     `page`: the GPU's index in the tenant's pages; the descriptors are open for reading and writing, belong to the caller, and stay open
 *     until the tenant is removed. Both pages are complete (sizes: pages.h). Returns the tenant's number, which a removed tenant may have
 *     had before, or -1. Allowed before and after the start, also with pages that served a former agent.
 * void gm_arbiter_remove(int number)
 *     Forgets a tenant; then its descriptors may be closed. If it still runs, it limits itself 200 ms later.
 * void gm_arbiter_figures(int number, struct gm_arbiter_figures *figures)
 *     What happened to a tenant since it was added; zeros for a number that is not in use. Nothing is charged while launches need no
 *     turn (gm_limits_gpu.pass).
 * int gm_arbiter_overruns(int number)
 *     1: the arbiter ended a turn, and work of that turn still runs. 0: no such work runs, or the number is not in use.
 * All but start and stop may be called by any thread at any time; each takes microseconds. Changes of the limits page are seen within
 * 50 ms. */
struct gm_arbiter_figures {
    uint64_t held_ns;  /* GPU time that was charged */
    uint64_t overruns; /* turns after which work did not end within two quanta: a long or endless kernel, or a turn that is never given back */
    uint64_t spoiled;  /* how often the turn page was too short or had values that only damage explains; it was restored each time */
    uint64_t waited_ns; /* the time without a turn in which at least one of its threads waited for it */
};
static struct tenant {
    struct gpu *gpu; /* NULL: the place is free */
    struct tenant *next; /* of the same GPU */
    struct tenant *sibling; /* the same container on another of its GPUs: a ring */
    int page; /* the GPU's index in the tenant's pages */
    int limits_fd, turn_fd;
    void *mapping; /* of the turn page, never read */
    int64_t share, ceiling, quantum_ns;
    int64_t virtual_ns, bucket_ns;
    int64_t debt_ns; /* GPU time beyond its share that its work took after its turn, beside others; until it is paid, others are next */
    int64_t overran_at; /* when it last had the GPU after its turn */
    int64_t active_at; /* when it last wanted or had the GPU */
    int64_t looked_at; /* when its page was last read */
    uint64_t until, since; /* as written to its turn page */
    uint32_t flags, grants, pass, away_from; /* away_from is the same for all siblings */
    bool overran; /* work of a turn that the arbiter ended still runs */
    uint32_t suspended; /* not 0: the container is suspended, and the flags of its processes are ignored */
    bool damaged; /* the page has values that the arbiter did not write */
    struct gm_arbiter_figures figures;
} tenants[TENANTS];
static struct gpu {
    struct tenant *tenants, *holder;
    int64_t served_at, due; /* when the arbiter last looked at the GPU, and when it looks next */
    int64_t until; /* the end of the holder's turn */
    int64_t virtual_ns; /* the lowest virtual time of the tenants that competed last */
    bool draining; /* its turn is over, its work has not ended */
} gpus[GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static atomic_bool runs;

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static off_t turn_at(const struct tenant *t) { return (off_t)(offsetof(struct gm_turn, gpu) + (size_t)t->page * sizeof(struct gm_turn_gpu)); }
static off_t limits_at(const struct tenant *t) { return (off_t)(offsetof(struct gm_limits, gpu) + (size_t)t->page * sizeof(struct gm_limits_gpu)); }

/* The flags of the tenant's live processes; 0 if the page can't be read. Words with bits that have no meaning are ignored. */
static uint32_t read_flags(struct tenant *t, int64_t now) {
    struct gm_turn_gpu turn;
    size_t head = offsetof(struct gm_turn_gpu, word), first = head + 64 * sizeof *turn.word;
    uint32_t flags = 0, bits = 0;
    if (pread(t->turn_fd, &turn, first, turn_at(t)) < (ssize_t)first) turn.slots = GM_SLOTS + 1;
    uint32_t slots = turn.slots;
    if (slots > 64 && slots <= GM_SLOTS)
        if (pread(t->turn_fd, turn.word, slots * sizeof *turn.word, turn_at(t) + (off_t)head) < (ssize_t)(slots * sizeof *turn.word)) slots = GM_SLOTS + 1;
    t->damaged |= slots > GM_SLOTS || turn.granted_until_ns != t->until || turn.holding_since_ns != t->since || turn.grants != t->grants;
    if (slots > GM_SLOTS) return 0;
    for (uint32_t i = 0; i <= slots; i++) {
        uint32_t word = i < slots ? turn.word[i] : turn.others;
        bits |= word;
        if (!(word & GM_MEANINGLESS)) flags |= gm_word_flags(word, (uint64_t)now);
    }
    t->damaged |= (bits & GM_MEANINGLESS) != 0;
    return t->suspended ? 0 : flags;
}
/* Returns whether all bytes were written. */
static bool put(int fd, const void *value, size_t n, off_t at) { return pwrite(fd, value, n, at) == (ssize_t)n; }
static void write_until(struct tenant *t, int64_t until) {
    t->until = (uint64_t)until;
    put(t->turn_fd, &t->until, sizeof t->until, turn_at(t) + (off_t)offsetof(struct gm_turn_gpu, granted_until_ns));
    atomic_thread_fence(memory_order_seq_cst);
}
static void write_since(struct tenant *t, int64_t since) {
    t->since = (uint64_t)since;
    put(t->turn_fd, &t->since, sizeof t->since, turn_at(t) + (off_t)offsetof(struct gm_turn_gpu, holding_since_ns));
}
static void wake(struct tenant *t) {
    off_t at = turn_at(t) + (off_t)offsetof(struct gm_turn_gpu, grants);
    t->grants++;
    put(t->turn_fd, &t->grants, sizeof t->grants, at);
    if (t->mapping) syscall(SYS_futex, (char *)t->mapping + at, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Restores a turn page that a process of the tenant has damaged. The processes write their words again by themselves. */
static void restore(struct tenant *t) {
    uint32_t head[2] = {0};
    struct stat file;
    bool whole = pread(t->turn_fd, head, sizeof head, 0) == (ssize_t)sizeof head && head[0] == GM_MAGIC && head[1] == GM_VERSION;
    if (whole && !t->damaged && !fstat(t->turn_fd, &file) && file.st_size == (off_t)sizeof(struct gm_turn)) return;
    struct gm_turn_gpu turn = {.granted_until_ns = t->until, .holding_since_ns = t->since, .grants = t->grants};
    head[0] = GM_MAGIC, head[1] = GM_VERSION;
    /* First the size, so that the tmpfs gets back what a process took of it; then the page gets memory for all its bytes. */
    t->damaged = ftruncate(t->turn_fd, sizeof(struct gm_turn)) || fallocate(t->turn_fd, 0, 0, sizeof(struct gm_turn));
    put(t->turn_fd, head, sizeof head, 0);
    put(t->turn_fd, &turn, sizeof turn, turn_at(t));
    t->figures.spoiled++;
    wake(t);
}
/* Without an arbiter the containers of a GPU work one after the other: each has a part of every GM_AWAY_NS. It has the same part on all of
 * its GPUs, since kernels of different GPUs may wait for one another. */
static bool part_is_free(const struct tenant *t, int64_t from) {
    const struct tenant *s = t;
    do
        for (const struct tenant *before = s->next; before; before = before->next) {
            int64_t behind = (from + 101 - before->away_from) % 100;
            if (before->away_from && (behind < before->share || 100 - behind < s->share)) return false;
        }
    while ((s = s->sibling) != t);
    return true;
}
/* Plans for a time without an arbiter: places the tenant's part as early as the parts of the tenants that were added before allow. If no
 * part is free, parts overlap. */
static void plan_absence(struct tenant *t) {
    int64_t from = t->away_from ? t->away_from - 1 : 0;
    while (from && part_is_free(t, from - 1)) from--;
    for (int i = 0; i < 100 && !part_is_free(t, from); i++) from = (from + 1) % 100;
    if (t->away_from == from + 1) return;
    struct tenant *s = t;
    do {
        s->away_from = (uint32_t)from + 1;
        put(s->limits_fd, &s->away_from, sizeof s->away_from, limits_at(s) + (off_t)offsetof(struct gm_limits_gpu, away_from));
    } while ((s = s->sibling) != t);
}
/* Reads changed limits, and writes the heartbeat and whether launches need a turn at all. */
static void refresh(struct tenant *t, int64_t now) {
    struct gm_limits_gpu limits;
    uint64_t beat = (uint64_t)now;
    if (pread(t->limits_fd, &limits, sizeof limits, limits_at(t)) == (ssize_t)sizeof limits) {
        t->share = limits.share < 1 ? 100 : limits.share > 100 ? 100 : limits.share; /* 0: not limited by the library */
        t->ceiling = limits.ceiling < t->share ? t->share : limits.ceiling > 100 ? 100 : limits.ceiling;
        t->quantum_ns = (limits.quantum_us < 1000 ? 1000 : limits.quantum_us > 100000 ? 100000 : limits.quantum_us) * 1000ll;
    } else limits.share = 0;
    if (pread(t->limits_fd, &t->suspended, sizeof t->suspended, (off_t)offsetof(struct gm_limits, suspend)) < 0) t->suspended = 0;
    put(t->limits_fd, &beat, sizeof beat, (off_t)offsetof(struct gm_limits, heartbeat_ns));
    restore(t);
    if (limits.share) plan_absence(t);
    uint32_t pass = t->ceiling >= 100 && t->gpu->tenants == t && !t->next;
    if (pass == t->pass) return;
    t->pass = pass;
    put(t->limits_fd, &pass, sizeof pass, limits_at(t) + (off_t)offsetof(struct gm_limits_gpu, pass));
    wake(t);
}

/* Whether the tenant wants a turn and is not at its ceiling. */
static bool may_have(const struct tenant *t) { return t->flags & GM_WANTS && t->bucket_ns >= t->quantum_ns / 4; }
/* Whether the tenant holds the GPU and uses it, or has a claim on the next turn. */
static bool competes(const struct tenant *t) { return t->gpu->holder == t ? t->flags : may_have(t) && t->debt_ns <= 0; }
/* The lowest virtual time of the tenants that compete for the GPU, except `but`. If no such tenant competes, the last known value. */
static int64_t lowest(const struct gpu *g, const struct tenant *but) {
    const struct tenant *least = NULL;
    for (struct tenant *t = g->tenants; t; t = t->next)
        if (t != but && competes(t) && (!least || t->virtual_ns < least->virtual_ns)) least = t;
    return least ? least->virtual_ns : g->virtual_ns;
}
/* The tenant had the GPU for this time. `due_ns`: its share of the time if others had the GPU, too; otherwise all of it. */
static void charge(struct tenant *t, int64_t ns, int64_t due_ns, int64_t now) {
    t->figures.held_ns += (uint64_t)ns;
    t->bucket_ns -= ns;
    if (t->bucket_ns < -DEBT_NS) t->bucket_ns = -DEBT_NS;
    if (t->overran) t->overran_at = now;
    if (!t->overran || ns <= due_ns) t->virtual_ns += ns * 100 / t->share;
    else if (t->debt_ns < DEBT_NS) t->debt_ns += ns - due_ns, t->virtual_ns += due_ns * 100 / t->share;
}
/* The tenant gives up its claim on time that it did not want or was not allowed to use, except for `kept_ns`. */
static void catch_up(struct tenant *t, int64_t kept_ns) {
    int64_t least = lowest(t->gpu, t) - kept_ns * 100 / t->share;
    if (t->virtual_ns < least) t->virtual_ns = least;
}
/* Whether the tenant's page need not be read now. The holder's page is read at each look. The page of a tenant that only waits changes
 * little, so it is read as seldom as that of an inactive tenant. */
static bool rests(const struct tenant *t, int64_t now) {
    int64_t interval = t->flags == GM_WANTS || now - t->active_at > RECENT_NS ? REST_SCAN_NS : SCAN_NS;
    return t->gpu->holder != t && now - t->looked_at < interval - DRAIN_SCAN_NS;
}
static void look(struct tenant *t, int64_t now) {
    if (rests(t, now)) return;
    bool competed = competes(t);
    t->flags = read_flags(t, now);
    t->bucket_ns += (now - t->looked_at) * t->ceiling / 100;
    t->looked_at = now;
    if (t->bucket_ns > 2 * t->quantum_ns || t->ceiling >= 100) t->bucket_ns = 2 * t->quantum_ns;
    if (!(t->flags & GM_BUSY)) t->overran = false;
    if (!t->flags) return;
    /* If its work overran its turn a short time ago, others had a part of the GPU then: the tenant may take that time back. */
    if (!competed && competes(t)) catch_up(t, now - t->overran_at < AWAY_NS ? DEBT_NS : 4 * t->quantum_ns);
    t->active_at = now;
}

/* Whether the holder yields to `other` before its turn ends. This happens if each of the two containers holds a GPU for which the other one
 * waits: kernels that communicate across GPUs would wait until the turns end. The container with more virtual time on both GPUs together
 * yields, so the result is the same for both GPUs. */
static bool yields(const struct tenant *h, const struct tenant *other) {
    for (const struct tenant *o = other->sibling; o != other; o = o->sibling)
        for (const struct tenant *s = h->sibling; s != h && o->gpu->holder == o; s = s->sibling) {
            if (s->gpu != o->gpu || !(s->flags & GM_WANTS)) continue;
            int64_t more = h->virtual_ns - other->virtual_ns + s->virtual_ns - o->virtual_ns;
            return more ? more > 0 : h > other;
        }
    return false;
}
/* The waiting tenant that is next, or NULL. A tenant with a debt is next only if no other one competes. */
static struct tenant *next(const struct gpu *g, const struct tenant *but) {
    struct tenant *best = NULL;
    for (struct tenant *t = g->tenants; t; t = t->next) {
        if (t == but || !may_have(t)) continue;
        if (!best || (competes(t) == competes(best) ? t->virtual_ns < best->virtual_ns : competes(t))) best = t;
    }
    return best;
}
/* How long a turn lasts: until the tenant's bucket is empty, but at most a quantum. The turn page has this end, so that a process checks at
 * the end whether its work has ended. */
static int64_t turn_ns(const struct tenant *t) {
    int64_t ns = t->ceiling >= 100 ? t->quantum_ns : t->bucket_ns * 100 / (100 - t->ceiling);
    return ns < t->quantum_ns ? ns : t->quantum_ns;
}
static void grant(struct gpu *g, struct tenant *t, int64_t now) {
    g->holder = t, g->until = now + turn_ns(t), g->draining = t->overran = false;
    write_since(t, now);
    write_until(t, g->until);
    wake(t);
}
/* No launch passes any longer; the GPU is released when the work has ended. */
static void end_turn(struct gpu *g, struct tenant *t, int64_t now) {
    g->until = now;
    write_until(t, 0);
    t->flags = read_flags(t, now);
}
static void release(struct gpu *g, struct tenant *t) {
    g->holder = NULL;
    write_until(t, 0);
    write_since(t, 0);
}
static void serve_holder(struct gpu *g, struct tenant *h, struct tenant *other, int64_t now) {
    bool crossed = other && yields(h, other);
    if (now < g->until) {
        if (h->bucket_ns <= 0 || crossed || (other && !h->flags)) end_turn(g, h, now);
        else if (!other && g->until < now + turn_ns(h) - MS) write_until(h, g->until = now + turn_ns(h));
        else if (other && now + MS >= g->until && (!competes(other) || h->virtual_ns + (g->until - now) * 100 / h->share <= other->virtual_ns))
            write_until(h, g->until += turn_ns(h));
    }
    if (now < g->until) return;
    if (!(h->flags & GM_BUSY)) release(g, h);
    else if (now > g->until + (crossed ? CROSSED_NS : 2 * h->quantum_ns)) {
        h->figures.overruns += !crossed;
        h->overran = true;
        release(g, h);
    } else if (!other && h->flags & GM_WANTS && h->bucket_ns >= h->quantum_ns / 4) grant(g, h, now);
    else g->draining = other || now < g->until + 5 * MS; /* after that it is a long kernel, and frequent looks are of no use */
}
/* Whether the time is charged to the tenant. The holder is charged while it has work, and while it keeps another tenant waiting; any other
 * tenant while work of an ended turn still runs. */
static bool has_gpu(const struct tenant *t, const struct tenant *other) {
    return t->gpu->holder == t ? t->flags & GM_BUSY || other : t->overran;
}
/* Looks at a GPU; returns the ns until the next look. */
static int64_t serve(struct gpu *g, int64_t now) {
    int64_t pause = REST_SCAN_NS;
    if (now - g->served_at > GM_AWAY_NS) { /* the arbiter was stopped, and the tenants limited themselves */
        if (g->holder) release(g, g->holder);
        g->served_at = now;
    }
    for (struct tenant *t = g->tenants; t; t = t->next) {
        if (t->flags & GM_WANTS && g->holder != t) t->figures.waited_ns += (uint64_t)(now - g->served_at);
        look(t, now);
        if (now - t->active_at < RECENT_NS) pause = SCAN_NS;
    }
    struct tenant *h = g->holder, *other = next(g, h);
    /* The driver divides the time between work that overran its turn and the holder's work. */
    int parts = 0;
    int64_t passed_ns = now - g->served_at, shares = 0;
    for (struct tenant *t = g->tenants; t; t = t->next) {
        parts += has_gpu(t, other);
        if (has_gpu(t, other) || may_have(t) || t->debt_ns > 0) shares += t->share;
    }
    for (struct tenant *t = g->tenants; t; t = t->next) {
        int64_t due_ns = shares ? passed_ns * t->share / shares : 0;
        if (has_gpu(t, other)) charge(t, passed_ns / parts, parts > 1 ? due_ns : passed_ns, now);
        else if (h && t->debt_ns > 0) t->debt_ns -= due_ns, t->virtual_ns += due_ns * 100 / t->share, catch_up(t, 0);
    }
    g->virtual_ns = lowest(g, NULL);
    g->served_at = now;
    g->draining = false;
    if (h) serve_holder(g, h, other, now);
    struct tenant *chosen = g->holder ? NULL : next(g, NULL);
    if (chosen) grant(g, chosen, now);
    return g->draining ? DRAIN_SCAN_NS : pause;
}

/* Looks at each GPU that is due, or nearly; returns the ns until the next one is due. */
static int64_t scan(int64_t now, bool refreshes) {
    int64_t next_due = now + REST_SCAN_NS;
    for (struct gpu *g = gpus; g < gpus + GPUS; g++) {
        if (!g->tenants) continue;
        for (struct tenant *t = g->tenants; refreshes && t; t = t->next) refresh(t, now);
        if (g->due <= now + DRAIN_SCAN_NS) g->due = now + serve(g, now);
        if (g->due < next_due) next_due = g->due;
    }
    return next_due - now;
}
static void *arbitrate(void *unused) {
    int64_t refreshed = 0;
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_NAME, "gpumgr-arbiter");
    while (atomic_load(&runs)) {
        int64_t now = clock_ns();
        pthread_mutex_lock(&lock);
        bool refreshes = now - refreshed >= REFRESH_NS;
        if (refreshes) refreshed = now;
        int64_t pause = scan(now, refreshes);
        pthread_mutex_unlock(&lock);
        struct timespec t = {0, pause};
        nanosleep(&t, NULL);
    }
    return unused;
}

EXPORT int gm_arbiter_start(void) {
    sigset_t all, old;
    sigfillset(&all);
    atomic_store(&runs, true);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int r = pthread_create(&thread, NULL, arbitrate, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return r;
}
EXPORT void gm_arbiter_stop(void) {
    if (atomic_exchange(&runs, false)) pthread_join(thread, NULL);
}
static struct tenant *in_use(int number) { return number >= 0 && number < TENANTS && tenants[number].gpu ? &tenants[number] : NULL; }
EXPORT int gm_arbiter_add(int gpu, int page, int limits_fd, int turn_fd) {
    if (gpu < 0 || gpu >= GPUS || page < 0 || page >= GM_GPUS) return NONE;
    void *mapping = mmap(NULL, sizeof(struct gm_turn), PROT_READ | PROT_WRITE, MAP_SHARED, turn_fd, 0);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < TENANTS && tenants[i].gpu) i++;
    if (i < TENANTS) {
        struct tenant *t = &tenants[i];
        struct gpu *g = &gpus[gpu];
        *t = (struct tenant){.gpu = g, .next = g->tenants, .page = page, .limits_fd = limits_fd, .turn_fd = turn_fd, .share = 100, .pass = 2,
                             .mapping = mapping == MAP_FAILED ? NULL : mapping};
        t->sibling = t;
        for (struct tenant *s = tenants; s < tenants + TENANTS && t->sibling == t; s++)
            if (s != t && s->gpu && s->turn_fd == turn_fd) t->sibling = s->sibling, s->sibling = t;
        int64_t now = clock_ns();
        g->tenants = t, g->due = 0;
        t->looked_at = now;
        if (!t->next) g->served_at = now;
        /* The count of an earlier arbiter is continued: a process that sleeps on it must see a change. */
        if (pread(turn_fd, &t->grants, sizeof t->grants, turn_at(t) + (off_t)offsetof(struct gm_turn_gpu, grants)) < 0) t->grants = 0;
        write_since(t, 0);
        write_until(t, 0);
        for (struct tenant *each = t; each; each = each->next) refresh(each, now);
        t->bucket_ns = t->quantum_ns;
        t->active_at = now - RECENT_NS;
        wake(t);
    }
    pthread_mutex_unlock(&lock);
    if (i == TENANTS && mapping != MAP_FAILED) munmap(mapping, sizeof(struct gm_turn));
    return i < TENANTS ? i : NONE;
}
EXPORT void gm_arbiter_remove(int number) {
    pthread_mutex_lock(&lock);
    struct tenant *t = in_use(number);
    if (t) {
        uint32_t pass = 0;
        struct tenant **link = &t->gpu->tenants;
        while (*link != t) link = &(*link)->next;
        *link = t->next;
        for (link = &t->sibling; *link != t;) link = &(*link)->sibling;
        *link = t->sibling;
        if (t->gpu->holder == t) release(t->gpu, t);
        put(t->limits_fd, &pass, sizeof pass, limits_at(t) + (off_t)offsetof(struct gm_limits_gpu, pass));
        if (t->mapping) munmap(t->mapping, sizeof(struct gm_turn));
        t->gpu = NULL;
    }
    pthread_mutex_unlock(&lock);
}
EXPORT void gm_arbiter_figures(int number, struct gm_arbiter_figures *figures) {
    pthread_mutex_lock(&lock);
    const struct tenant *t = in_use(number);
    *figures = t ? t->figures : (struct gm_arbiter_figures){0};
    pthread_mutex_unlock(&lock);
}
EXPORT int gm_arbiter_overruns(int number) {
    pthread_mutex_lock(&lock);
    const struct tenant *t = in_use(number);
    int overruns = t && t->overran;
    pthread_mutex_unlock(&lock);
    return overruns;
}
