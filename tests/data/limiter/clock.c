/* The model clock's preloaded part (clock.h): clock_gettime, sleeps and futex waits of the process use the shared clock. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "clock.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 1024, FREE = 0, RUNNING, WAITING };
#define NEVER INT64_MAX
#define SECOND 1000000000LL
#define CHECK_NS 20000000 /* real time after which a waiter looks for processes that died */
struct thread {
    int pid, tid, state, tenant;
    int64_t until;
    uintptr_t futex; /* the word's offset in its page, plus one; 0: not a futex */
    _Atomic uint32_t wake;
};
struct shared {
    pthread_mutex_t lock;
    int64_t now, real; /* the clock at real time `real`; `now` alone while it is driven */
    int driven, entered, threads;
    struct thread thread[THREADS];
};
static struct shared *s;
static __thread struct thread *self;
static pthread_key_t at_exit;

/* Other libraries' constructors may come here before this one's. */
static long real_syscall(long n, ...) {
    static long (*found)(long, ...);
    if (!found) found = (long (*)(long, ...))dlvsym(RTLD_NEXT, "syscall", "GLIBC_2.2.5");
    if (!found) found = (long (*)(long, ...))dlvsym(RTLD_NEXT, "syscall", "GLIBC_2.17");
    va_list v;
    va_start(v, n);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(v, long);
    va_end(v);
    return found(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static int64_t real_now(void) {
    struct timespec t;
    real_syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}
static int64_t now_locked(void) { return s->driven ? s->now : s->now + real_now() - s->real; }
static void lock(void) {
    if (pthread_mutex_lock(&s->lock) == EOWNERDEAD) pthread_mutex_consistent(&s->lock);
}
static void unlock(void) { pthread_mutex_unlock(&s->lock); }
static void rouse(struct thread *t) {
    atomic_fetch_add(&t->wake, 1);
    real_syscall(SYS_futex, &t->wake, FUTEX_WAKE, 1, NULL, NULL, 0);
}
static void follow_real_time(int on) {
    if (s->driven != on) return;
    if (on) s->real = real_now(), s->driven = 0;
    else s->now = now_locked(), s->driven = 1;
    for (int i = 0; i < s->threads; i++)
        if (s->thread[i].state != FREE) rouse(&s->thread[i]);
}
static void drop(struct thread *t) {
    t->state = FREE;
    if (t->tenant && --s->entered == 0) follow_real_time(1);
    t->tenant = 0;
}
static int ended(struct thread *t) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", t->pid, t->tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 1;
    text[n] = 0;
    char *state = strrchr(text, ')');
    return !state || state[2] == 'Z' || state[2] == 'X';
}
static void reap(void) {
    for (int i = 0; i < s->threads; i++)
        if (s->thread[i].state != FREE && ended(&s->thread[i])) drop(&s->thread[i]);
}
/* Moves the clock to the next end of a wait, if every thread waits. Call with the lock. */
static void advance(void) {
    if (!s->driven) return;
    int64_t next = NEVER;
    for (int i = 0; i < s->threads; i++) {
        struct thread *t = &s->thread[i];
        if (t->state == RUNNING) return;
        if (t->state == WAITING && t->until < next) next = t->until;
    }
    if (next == NEVER) return;
    if (next > s->now) s->now = next;
    for (int i = 0; i < s->threads; i++) {
        struct thread *t = &s->thread[i];
        if (t->state == WAITING && t->until <= s->now) {
            t->state = RUNNING, t->futex = 0;
            if (t != self) rouse(t);
        }
    }
}
static void leave_at_exit(void *t) {
    (void)t;
    model_leave();
}
static struct thread *join(void) {
    if (self && self->state != FREE && self->pid == getpid()) return self;
    int tid = (int)real_syscall(SYS_gettid), i = 0;
    if (s->threads == THREADS) reap(); /* a process that was killed or called _exit has not left */
    while (i < THREADS - 1 && s->thread[i].state != FREE) i++;
    self = &s->thread[i];
    self->pid = getpid(), self->tid = tid, self->state = RUNNING, self->tenant = 0, self->futex = 0;
    if (i >= s->threads) s->threads = i + 1;
    pthread_setspecific(at_exit, self);
    return self;
}
/* Waits until the time, or until the futex word is woken. Returns 0 when woken, else ETIMEDOUT or EAGAIN. */
static int wait_for(int64_t until, const uint32_t *word, uint32_t value) {
    lock();
    struct thread *t = join();
    if (word && __atomic_load_n(word, __ATOMIC_SEQ_CST) != value) {
        unlock();
        return EAGAIN;
    }
    t->until = until, t->futex = word ? ((uintptr_t)word & 4095) + 1 : 0, t->state = WAITING;
    advance();
    while (t->state == WAITING) {
        int64_t left = CHECK_NS;
        if (!s->driven) {
            if (t->until <= now_locked()) {
                t->state = RUNNING;
                break;
            }
            if (t->until - now_locked() < left) left = t->until - now_locked();
        }
        uint32_t seen = atomic_load(&t->wake);
        unlock();
        struct timespec pause = {0, left};
        long r = real_syscall(SYS_futex, &t->wake, FUTEX_WAIT, seen, &pause, NULL, 0);
        int timed_out = r && errno == ETIMEDOUT;
        lock();
        if (timed_out && s->driven) reap();
        advance();
    }
    int woken = word && t->until > now_locked();
    unlock();
    return woken ? 0 : ETIMEDOUT;
}
int64_t model_now(void) {
    if (!s) return real_now();
    if (__atomic_load_n(&s->driven, __ATOMIC_ACQUIRE)) return __atomic_load_n(&s->now, __ATOMIC_ACQUIRE);
    lock();
    int64_t now = now_locked();
    unlock();
    return now;
}
void model_wait_until(int64_t at_ns) {
    if (s) {
        wait_for(at_ns, NULL, 0);
        return;
    }
    struct timespec t = {at_ns / SECOND, at_ns % SECOND};
    real_syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}
void model_enter(int tenants) {
    if (!s) return;
    lock();
    struct thread *t = join();
    if (!t->tenant) t->tenant = 1, s->entered++;
    if (s->entered >= tenants) follow_real_time(0);
    while (!s->driven) {
        uint32_t seen = atomic_load(&t->wake);
        unlock();
        real_syscall(SYS_futex, &t->wake, FUTEX_WAIT, seen, NULL, NULL, 0);
        lock();
    }
    unlock();
}
void model_leave(void) {
    if (!s || !self || self->pid != getpid()) return;
    lock();
    drop(self);
    self = NULL;
    advance();
    unlock();
}
void model_stop(void) {
    for (int others = 1; s && others;) {
        lock();
        others = 0;
        for (int i = 0; i < s->threads; i++) {
            struct thread *t = &s->thread[i];
            others += t->state == RUNNING && t->pid == getpid() && t != self;
        }
        for (int i = 0; i < s->threads && !others; i++)
            if (s->thread[i].state != FREE && s->thread[i].pid == getpid()) drop(&s->thread[i]);
        if (!others) advance();
        unlock();
        if (others) wait_for(model_now() + 1000, NULL, 0);
    }
    kill(getpid(), SIGSTOP);
}
int model_threads(void) {
    int n = 0;
    if (!s) return 0;
    lock();
    for (int i = 0; i < s->threads; i++) n += s->thread[i].state != FREE && s->thread[i].pid == getpid();
    unlock();
    return n;
}
static void start(void) __attribute__((constructor));
static void start(void) {
    const char *path = getenv("MODEL_CLOCK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    struct shared *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    pthread_key_create(&at_exit, leave_at_exit);
    if (p != MAP_FAILED) s = p;
}
/* Makes the shared file: `model_clock FILE`, built with -DMAKE. */
#ifdef MAKE
int main(int argc, char **argv) {
    int fd = argc > 1 ? open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0666) : -1;
    if (fd < 0 || ftruncate(fd, sizeof(struct shared))) return 1;
    struct shared *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    p->real = real_now(), p->now = p->real;
    return pthread_mutex_init(&p->lock, &a);
}
#endif

int clock_gettime(clockid_t id, struct timespec *t) {
    if (!s || (id != CLOCK_MONOTONIC && id != CLOCK_MONOTONIC_RAW && id != CLOCK_MONOTONIC_COARSE))
        return (int)real_syscall(SYS_clock_gettime, id, t);
    int64_t now = model_now();
    t->tv_sec = now / SECOND, t->tv_nsec = now % SECOND;
    return 0;
}
int clock_nanosleep(clockid_t id, int flags, const struct timespec *t, struct timespec *left) {
    if (!s) return real_syscall(SYS_clock_nanosleep, id, flags, t, left) ? errno : 0;
    int64_t ns = t->tv_sec * SECOND + t->tv_nsec;
    if (flags & TIMER_ABSTIME && id == CLOCK_REALTIME) return real_syscall(SYS_clock_nanosleep, id, flags, t, left) ? errno : 0;
    wait_for(flags & TIMER_ABSTIME ? ns : model_now() + ns, NULL, 0);
    return 0;
}
int nanosleep(const struct timespec *t, struct timespec *left) {
    int r = clock_nanosleep(CLOCK_MONOTONIC, 0, t, left);
    if (r) errno = r;
    return r ? -1 : 0;
}
int usleep(useconds_t us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    return nanosleep(&t, NULL);
}
int sched_yield(void) {
    if (!s || !__atomic_load_n(&s->driven, __ATOMIC_ACQUIRE)) return (int)real_syscall(SYS_sched_yield);
    wait_for(model_now() + 1000, NULL, 0);
    return 0;
}
static long futex(uint32_t *word, int op, uint32_t value, const struct timespec *t) {
    int command = op & ~(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME);
    if (command == FUTEX_WAKE) {
        lock();
        long n = 0;
        for (int i = 0; i < s->threads; i++) {
            struct thread *w = &s->thread[i];
            if (w->state != WAITING || w->futex != ((uintptr_t)word & 4095) + 1) continue;
            w->state = RUNNING, w->futex = 0, n++;
            rouse(w);
        }
        unlock();
        return n;
    }
    int64_t ns = t ? t->tv_sec * SECOND + t->tv_nsec : NEVER;
    int r = wait_for(!t || command == FUTEX_WAIT_BITSET ? ns : model_now() + ns, word, value);
    if (r) errno = r;
    return r ? -1 : 0;
}
long syscall(long n, ...) {
    va_list v;
    va_start(v, n);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(v, long);
    va_end(v);
    int command = (int)a[1] & ~(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME);
    if (s && n == SYS_futex && (command == FUTEX_WAIT || command == FUTEX_WAKE || command == FUTEX_WAIT_BITSET))
        return futex((uint32_t *)a[0], (int)a[1], (uint32_t)a[2], (const struct timespec *)a[3]);
    return real_syscall(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}
