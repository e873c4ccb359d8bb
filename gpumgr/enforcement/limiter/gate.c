/* The turn: a launch waits until the arbiter grants it to the container. Markers (streams.c) show when the launched work has ended; then a
 * helper thread gives the turn back.
 *
 * A launch that needs no turn costs a load and an addition to the count of launches. A launch that finds the turn granted costs two atomic
 * additions and a read of the clock. The helper sleeps while the process has no work on the GPU. */
#define _GNU_SOURCE
#include "gate.h"
#include "memory.h"
#include "old_glibc.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000ull
enum {
    IDLE_NS = 1000000,     /* a process without launches for this time, and without work, gives the turn back */
    DRAIN_POLL_NS = 50000, /* between two looks at the work after the end of the turn */
    LOOK_NS = 250000,      /* between two looks at the work during the turn */
};
#define ARBITER_GONE_NS (200 * MS) /* after the last heartbeat */
#define DEBT_NS (2000 * (int64_t)MS)
#define PASS 0x10001ull /* added to gm_gate.passes: one more launch, which is inside the driver's call */
#define INFLIGHT 0xffffull

static struct gm_gate gates[GM_GPUS];
static atomic_uint wake; /* futex: a gate became busy, or the process ends */
static atomic_int helper; /* 0: none, 1: runs, 2: shall stop, 3: stopped */

/* Sleeps. The thread can't be cancelled here, where it would leave counts and flags behind. */
void gm_nap(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    nanosleep(&t, NULL);
    pthread_setcancelstate(before, NULL);
}
static void futex_wait(const void *word, uint32_t seen, uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, ns ? &t : NULL, NULL, 0);
}
static void futex_wake(const void *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

struct gm_gate *gm_gate_of(int gpu) { return gpu < 0 ? NULL : &gates[gpu]; }
static int gpu_of(const struct gm_gate *g) { return (int)(g - gates); } /* index into the pages */
static const struct gm_limits_gpu *limits(const struct gm_process *p, const struct gm_gate *g) { return &p->limits->gpu[gpu_of(g)]; }
static struct gm_turn_gpu *turn(const struct gm_process *p, const struct gm_gate *g) { return &p->turn->gpu[gpu_of(g)]; }
static uint64_t granted_until(const struct gm_process *p, const struct gm_gate *g) {
    return __atomic_load_n(&turn(p, g)->granted_until_ns, __ATOMIC_SEQ_CST);
}
static uint64_t quantum_ns(const struct gm_process *p, const struct gm_gate *g) {
    uint64_t us = __atomic_load_n(&limits(p, g)->quantum_us, __ATOMIC_RELAXED);
    return (us < 1000 ? 1000 : us > 100000 ? 100000 : us) * 1000;
}
uint64_t gm_patience_ns(const struct gm_gate *g) {
    struct gm_process *p = gm_process();
    return p ? 2 * quantum_ns(p, g) : 0;
}

/* -- this process's word in the turn page --------------------------------------------------------------------------------------- */
static uint32_t *word_of(const struct gm_process *p, const struct gm_gate *g) {
    return p->slot ? &turn(p, g)->word[p->slot_index] : &turn(p, g)->others;
}
static void word_set(const struct gm_process *p, struct gm_gate *g, uint32_t set, uint32_t clear, uint64_t now) {
    struct gm_turn_gpu *t = turn(p, g);
    uint32_t *word = word_of(p, g), seen = __atomic_load_n(word, __ATOMIC_SEQ_CST), next, slots = __atomic_load_n(&t->slots, __ATOMIC_RELAXED);
    while (p->slot && slots <= p->slot_index && !__atomic_compare_exchange_n(&t->slots, &slots, p->slot_index + 1, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
    do next = (((seen & (GM_WANTS | GM_BUSY)) | set) & ~clear) | gm_stamp(now);
    while (!__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}
static void set_busy(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    if (atomic_load(&g->busy)) return;
    word_set(p, g, GM_BUSY, 0, now);
    if (atomic_exchange(&g->busy, true)) return;
    atomic_fetch_add(&g->periods, 1);
    atomic_fetch_add(&wake, 1);
    futex_wake(&wake);
}
static void begin_wait(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    atomic_fetch_add(&g->waiting, 1);
    word_set(p, g, GM_WANTS, 0, now);
}
static void end_wait(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    if (atomic_fetch_sub(&g->waiting, 1) != 1) return;
    word_set(p, g, 0, GM_WANTS, now);
    if (atomic_load(&g->waiting)) word_set(p, g, GM_WANTS, 0, now);
}

/* -- without an arbiter: this process's part of the share, by a bucket of its own ----------------------------------------------- */
static pthread_mutex_t bucket_lock = PTHREAD_MUTEX_INITIALIZER;
/* Whether no arbiter runs. */
static bool alone(const struct gm_process *p, uint64_t now) {
    uint64_t beat = __atomic_load_n(&p->limits->heartbeat_ns, __ATOMIC_RELAXED);
    return now > beat + ARBITER_GONE_NS;
}
/* Fills the bucket, and charges the time since the last call if the process has work. True: a launch may pass. If the container's part
 * of each GM_AWAY_NS is known (away_from), all of its processes may use that part, and other containers may not. */
static bool bucket(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    uint32_t share = __atomic_load_n(&limits(p, g)->share, __ATOMIC_RELAXED), processes = !p->slot, slots = turn(p, g)->slots;
    uint64_t from = __atomic_load_n(&limits(p, g)->away_from, __ATOMIC_RELAXED), percent = GM_AWAY_NS / 100;
    for (uint32_t i = 0; i < slots && i < GM_SLOTS && !from; i++)
        processes += gm_word_flags(__atomic_load_n(&turn(p, g)->word[i], __ATOMIC_RELAXED), now) != 0;
    int64_t quantum = (int64_t)quantum_ns(p, g), most = from ? GM_AWAY_NS : quantum;
    pthread_mutex_lock(&bucket_lock);
    int64_t passed = now > g->bucket_at_ns ? (int64_t)(now - g->bucket_at_ns) : 0;
    if (passed > DEBT_NS) passed = DEBT_NS;
    if (now > g->bucket_at_ns) g->bucket_at_ns = now;
    g->bucket_ns += passed * share / 100 / (processes ? processes : 1) - (atomic_load(&g->busy) ? passed : 0);
    if (g->bucket_ns > most) g->bucket_ns = most;
    if (g->bucket_ns < -DEBT_NS) g->bucket_ns = -DEBT_NS;
    if (g->bucket_ns <= 0) g->bucket_open = false;
    else if (g->bucket_ns >= quantum / 4) g->bucket_open = true;
    bool passes = g->bucket_open && (!from || (now + (101 - from) * percent) % GM_AWAY_NS < share * percent);
    pthread_mutex_unlock(&bucket_lock);
    return passes;
}

/* A suspended process gives its turn back. After the resume, the helper looks at its work again and finds that it has ended. */
static uint64_t sit_out(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    word_set(p, g, 0, GM_BUSY, now);
    pthread_mutex_lock(&bucket_lock);
    g->bucket_at_ns = now;
    pthread_mutex_unlock(&bucket_lock);
    return 5 * MS;
}

/* -- the helper ---------------------------------------------------------------------------------------------------------------- */
/* Adds to the launches in the use page; returns how many there were before. */
static uint64_t count(const struct gm_process *p, int gpu, uint64_t launches) {
    return p->slot ? __atomic_fetch_add(&p->slot->gpu[gpu].launches, launches, __ATOMIC_RELAXED) : 0;
}
static void publish(const struct gm_process *p, struct gm_gate *g, uint64_t passes) {
    count(p, gpu_of(g), passes - g->published);
    g->published = passes;
}
/* Gives the turn back when the work has ended, and the turn is over or nothing was launched for a while. Returns after how many ns to look
 * again; 0: the gate is not busy. */
static uint64_t look_after(const struct gm_process *p, struct gm_gate *g) {
    if (!atomic_load(&g->busy)) return 0;
    uint64_t now = gm_now(), until = granted_until(p, g), last = atomic_load(&g->last_ns);
    uint64_t passes = atomic_load(&g->passes);
    bool over = now >= until;
    publish(p, g, passes >> 16);
    if (gm_suspended()) return sit_out(p, g, now);
    uint32_t word = __atomic_load_n(word_of(p, g), __ATOMIC_RELAXED);
    if ((word & ~0xffu) != gm_stamp(now) || !(word & GM_BUSY)) word_set(p, g, GM_BUSY, 0, now); /* the word may be shared or restored */
    if (over && alone(p, now)) bucket(p, g, now);
    if (!over && now < last + IDLE_NS) {
        uint64_t next = until < last + IDLE_NS ? until : last + IDLE_NS;
        return next > now + DRAIN_POLL_NS ? next - now : DRAIN_POLL_NS;
    }
    if (passes & INFLIGHT) return over ? DRAIN_POLL_NS : LOOK_NS;
    if (!gm_streams_ended(g)) {
        g->ended_ns = 0;
        return over ? DRAIN_POLL_NS : LOOK_NS;
    }
    if (!g->ended_ns || g->ended_passes != passes) g->ended_ns = now, g->ended_passes = passes;
    if (!over && now < g->ended_ns + IDLE_NS) return LOOK_NS; /* a program that waits for its results launches again at once */
    word_set(p, g, 0, GM_BUSY, now);
    atomic_store(&g->busy, false);
    if (atomic_load(&g->passes) != passes) {
        atomic_store(&g->busy, true);
        word_set(p, g, GM_BUSY, 0, now);
        return DRAIN_POLL_NS;
    }
    gm_frees_settle(); /* other processes of the container may need the freed memory before this one does */
    return 0;
}
static void *help(void *unused) {
    prctl(PR_SET_TIMERSLACK, 1);
    gm_relax(); /* so that its calls never invalidate a capture */
    while (atomic_load(&helper) == 1) {
        uint32_t seen = atomic_load(&wake);
        uint64_t pause = 0;
        struct gm_process *p = gm_process();
        for (int i = 0; p && i < GM_GPUS; i++) {
            uint64_t next = look_after(p, &gates[i]);
            if (next && (!pause || next < pause)) pause = next;
        }
        if (pause) gm_nap(pause);
        else futex_wait(&wake, seen, 0);
    }
    atomic_store(&helper, 3);
    return unused;
}
/* Stops the helper before the driver's own exit handlers run: otherwise its next call would find the driver gone. */
static void stop_at_exit(void) {
    int runs = 1;
    if (!atomic_compare_exchange_strong(&helper, &runs, 2)) return;
    atomic_fetch_add(&wake, 1);
    futex_wake(&wake);
    for (int i = 0; i < 1000 && atomic_load(&helper) != 3; i++) gm_nap(100000);
    struct gm_process *p = gm_process();
    for (int i = 0; p && i < GM_GPUS; i++)
        if (atomic_load(&gates[i].busy)) word_set(p, &gates[i], 0, GM_BUSY | GM_WANTS, gm_now());
}
static bool start_helper(void) {
    static atomic_bool registered;
    int none = 0;
    if (!atomic_compare_exchange_strong(&helper, &none, 1)) return none == 1;
    sigset_t all, old;
    sigfillset(&all);
    pthread_t thread;
    sigprocmask(SIG_SETMASK, &all, &old); /* the helper inherits the mask of this thread */
    bool made = !pthread_create(&thread, NULL, help, NULL);
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (made) pthread_detach(thread);
    else gm_disable("no thread can be started", "raise the container's limit of processes"), atomic_store(&helper, 3);
    if (!atomic_exchange(&registered, true)) atexit(stop_at_exit);
    return made;
}
void gm_gate_after_fork(void) {
    atomic_store(&helper, 0);
    pthread_mutex_init(&bucket_lock, NULL);
    for (int i = 0; i < GM_GPUS; i++) {
        atomic_store(&gates[i].busy, false);
        atomic_store(&gates[i].passes, 0);
        gates[i].published = 0;
        atomic_store(&gates[i].waiting, 0);
    }
}

/* -- launches ------------------------------------------------------------------------------------------------------------------ */
/* Call it if the page says that launches need no turn. If the arbiter was killed, the page is outdated, and the share is the limit. To
 * notice the arbiter's end, the clock is read once in 64 launches. */
static bool needs_no_turn(const struct gm_process *p, struct gm_gate *g) {
    if (atomic_load_explicit(&g->no_arbiter, memory_order_relaxed)) {
        if (alone(p, gm_now())) return false;
        atomic_store_explicit(&g->no_arbiter, false, memory_order_relaxed);
    }
    if (!(count(p, gpu_of(g), 1) & 63) && alone(p, gm_now())) atomic_store_explicit(&g->no_arbiter, true, memory_order_relaxed);
    return true;
}
/* Passes if the turn is granted, or if there is no arbiter and the process's bucket allows it. */
static bool try_pass(const struct gm_process *p, struct gm_gate *g, uint64_t now) {
    bool by_itself = now >= granted_until(p, g);
    if (by_itself && (!alone(p, now) || !bucket(p, g, now))) return false;
    atomic_fetch_add(&g->passes, PASS);
    set_busy(p, g, now);
    if (by_itself || gm_now() < granted_until(p, g)) return true;
    atomic_fetch_sub(&g->passes, PASS);
    return false;
}
/* Passes if the turn is granted and the process is busy already. Writes and reads have the order of try_pass. */
static bool passes_at_once(const struct gm_process *p, struct gm_gate *g) {
    atomic_fetch_add(&g->passes, PASS);
    uint64_t now = atomic_load(&g->busy) ? gm_now() : UINT64_MAX;
    if (now < granted_until(p, g)) {
        atomic_store_explicit(&g->last_ns, now, memory_order_relaxed);
        return true;
    }
    atomic_fetch_sub(&g->passes, PASS);
    return false;
}
static void wait_for_turn(struct gm_process *p, struct gm_gate *g) {
    uint64_t now = gm_now();
    begin_wait(p, g, now);
    for (;;) {
        if (gm_suspended()) {
            end_wait(p, g, now);
            gm_await_resume();
            begin_wait(p, g, now = gm_now());
        }
        uint32_t seen = __atomic_load_n(&turn(p, g)->grants, __ATOMIC_SEQ_CST);
        now = gm_now();
        if (try_pass(p, g, now)) break;
        if (atomic_load(&helper) != 1 || (__atomic_load_n(&limits(p, g)->pass, __ATOMIC_RELAXED) && !alone(p, now))) {
            atomic_fetch_add(&g->passes, PASS);
            break;
        }
        word_set(p, g, GM_WANTS, 0, now);
        if (alone(p, now)) gm_nap(MS);
        else futex_wait(&turn(p, g)->grants, seen, 100 * MS);
    }
    end_wait(p, g, now);
}

bool gm_needs_no_turn(void) {
    const struct gm_process *p = gm_process();
    if (!p) return true;
    if (!__atomic_load_n(&p->limits->gpu->pass, __ATOMIC_RELAXED) || __atomic_load_n(&p->limits->gpus, __ATOMIC_RELAXED) != 1) return false;
    return needs_no_turn(p, gates);
}
struct gm_pass gm_enter(CUstream handle, bool per_thread) {
    struct gm_pass none = {0}, pass;
    struct gm_process *p = gm_process();
    if (!p) return none;
    struct gm_stream *stream = gm_stream_of(handle, per_thread);
    struct gm_gate *g = stream ? stream->gate : NULL;
    if (!g) return none;
    if (__atomic_load_n(&limits(p, g)->pass, __ATOMIC_RELAXED) && needs_no_turn(p, g)) return none;
    if (!__atomic_load_n(&limits(p, g)->share, __ATOMIC_RELAXED) || gm_stream_captures(handle, per_thread)) {
        count(p, gpu_of(g), 1);
        return none;
    }
    if (atomic_load_explicit(&helper, memory_order_relaxed) != 1 && !start_helper()) return none;
    pass = (struct gm_pass){g, stream, 0};
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &pass.cancel); /* a driver's call that waits for its queue can be cancelled */
    if (passes_at_once(p, g)) return pass;
    if (!try_pass(p, g, gm_now())) wait_for_turn(p, g);
    atomic_store_explicit(&g->last_ns, gm_now(), memory_order_relaxed);
    return pass;
}

void gm_leave(struct gm_pass pass) {
    struct gm_gate *g = pass.gate;
    if (!g) return;
    /* Threads that launch into one stream at once may count too few, but never none. */
    uint32_t unmarked = atomic_load_explicit(&pass.stream->unmarked, memory_order_relaxed) + 1;
    atomic_store_explicit(&pass.stream->unmarked, unmarked, memory_order_relaxed);
    bool per_thread = atomic_load_explicit(&pass.stream->thread, memory_order_relaxed) != 0;
    /* A per-thread stream is marked before `passes` shrinks: the helper can't mark it, so the helper must wait until this thread has. */
    if (per_thread) gm_stream_mark(pass.stream);
    atomic_fetch_sub_explicit(&g->passes, 1, memory_order_release);
    if (!per_thread && unmarked >= atomic_load_explicit(&pass.stream->spacing, memory_order_relaxed)) gm_stream_mark(pass.stream);
    pthread_setcancelstate(pass.cancel, NULL);
}
