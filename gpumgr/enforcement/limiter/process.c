/* The pages, this process's slot, its devices; suspension; fork. Without _GNU_SOURCE: with it, glibc 2.38 and newer replaces strtoull and
 * sscanf by functions that older ones lack. */
#include "library.h"
#include "old_glibc.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef PLACE /* the tests have another one */
#define PLACE "/etc/gpumgr/"
#endif
enum { DEVICES = 64 };

static struct gm_process process;
static atomic_int state;    /* enum gm_state: of this process */
static atomic_bool said;    /* each process prints at most one message */
static atomic_int starting; /* a thread maps the pages */
static atomic_int gpu_of[DEVICES];

uint64_t gm_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* -- suspension ---------------------------------------------------------------------------------------------------------------- */
enum { RESUME_LOOK_NS = 5000000 };
static const uint32_t unknown = 1, never = 0;
/* The word that stubs read: `suspend` of the page, or `unknown` until the first call of a hook has looked for the page. */
__attribute__((visibility("hidden"))) _Atomic(const uint32_t *) gm_suspend_word = &unknown;
bool gm_suspended(void) {
    const uint32_t *word = atomic_load_explicit(&gm_suspend_word, memory_order_relaxed);
    return word != &unknown && __atomic_load_n(word, __ATOMIC_RELAXED);
}
void gm_await_resume(void) {
    const uint32_t *none = &unknown;
    if (atomic_load(&gm_suspend_word) == &unknown && !gm_process()) atomic_compare_exchange_strong(&gm_suspend_word, &none, &never);
    for (; gm_suspended(); gm_nap(RESUME_LOOK_NS))
        if (!__atomic_load_n(&process.use->resume_requests, __ATOMIC_RELAXED)) __atomic_store_n(&process.use->resume_requests, 1, __ATOMIC_RELAXED);
}

/* Prints one message: what happens, in which file, why, and what to do. */
static void say(const char *what, const char *where, const char *why, const char *remedy) {
    if (atomic_exchange(&said, true)) return;
    char line[320];
    int n = snprintf(line, sizeof line, "libgpumgr: process %d %s: %s: %s; %s\n", (int)getpid(), what, where, why, remedy);
    if (write(2, line, (size_t)n) < 0) return;
}

static const char unlimited[] = "runs without gpumgr's limits";
void gm_disable(const char *why, const char *remedy) {
    say(unlimited, PLACE "limits" GM_SUFFIX, why, remedy);
    if (process.slot) {
        snprintf(process.slot->fault, sizeof process.slot->fault, "%s", why);
        __atomic_store_n(&process.slot->state, GM_DISABLED, __ATOMIC_RELEASE);
    }
    atomic_store(&state, GM_DISABLED);
}

/* Maps a page; NULL: it failed, and the reason was printed. */
static void *map(const char *path, size_t bytes, bool writable) {
    int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        say(unlimited, path, strerror(errno), "start the container anew; if it comes again, ask for the log of gpumgr on this node");
        return NULL;
    }
    void *at = MAP_FAILED;
    if (lseek(fd, 0, SEEK_END) >= (off_t)bytes) at = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    const uint32_t *head = at;
    if (at != MAP_FAILED && head[0] == GM_MAGIC && head[1] == GM_VERSION) return at;
    say(unlimited, path, "damaged, or of another version than the library's", "start the container anew");
    if (at != MAP_FAILED) munmap(at, bytes);
    return NULL;
}

static uint64_t pid_namespace(void) {
    char text[64];
    ssize_t n = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    if (n <= 0) return 0;
    text[n] = 0;
    const char *number = strchr(text, '[');
    return number ? strtoull(number + 1, NULL, 10) : 0;
}

/* Empties a slot. Its bytes stay in reserved_bytes until gm_ledger_settle. */
static void empty_slot(int index) {
    struct gm_use_slot *s = &process.use->slot[index];
    for (int g = 0; g < GM_GPUS; g++) __atomic_store_n(&process.turn->gpu[g].word[index], 0, __ATOMIC_SEQ_CST);
    memset(s->gpu, 0, sizeof s->gpu);
    memset(s->fault, 0, sizeof s->fault);
}

int gm_slots(void) {
    uint32_t slots = __atomic_load_n(&process.use->slots, __ATOMIC_ACQUIRE);
    return slots < GM_SLOTS ? (int)slots : GM_SLOTS;
}
/* The fields 1, 3, 20 and 28 of /proc/PID/stat; `who`: the PID, or self. The stack is 0 if it can't be read. */
struct stat_fields { uint32_t pid; char state; int threads; unsigned long long stack; };
static struct stat_fields stat_of(const char *who) {
    struct stat_fields f = {0, 0, 2, 0};
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%s/stat", who);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[n < 0 ? 0 : n] = 0;
    const char *state = strrchr(text, ')');
    if (state) sscanf(state, ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d %*s %*s %*s %*s %*s %*s %*s %llu", &f.state, &f.threads, &f.stack);
    sscanf(text, "%u", &f.pid);
    return f;
}
/* A zombie has ended, unless it is the first thread of a process in which other threads still run. `stack`: where the first stack of the
 * slot's process began; 0: not known. A process with another stack has executed another program, which ended its contexts. */
static bool has_ended(uint32_t pid, uint64_t stack) {
    char who[16];
    if (kill((pid_t)pid, 0) && errno == ESRCH) return true;
    if (stat_of("self").pid != process.pid) return false; /* /proc is that of another PID namespace */
    snprintf(who, sizeof who, "%u", pid);
    struct stat_fields f = stat_of(who);
    return (f.state == 'Z' && f.threads < 2) || (stack && f.stack && f.stack != stack);
}
int gm_reap_slots(void) {
    struct gm_process *p = process.turn ? &process : NULL;
    uint64_t own = p ? pid_namespace() : 0;
    int freed = 0;
    for (int i = 0; own && i < gm_slots(); i++) {
        struct gm_use_slot *s = &p->use->slot[i];
        uint64_t *head = (uint64_t *)s, seen = __atomic_load_n(head, __ATOMIC_ACQUIRE), stack = s->gpu->stack; /* low half: pid; high half: state */
        uint32_t pid = (uint32_t)seen, state = (uint32_t)(seen >> 32);
        /* Without a state, the process `pid` empties the slot, and the stack is that of the process before. */
        if (!pid || s->pid_namespace != own || !has_ended(pid, state ? stack : 0)) continue;
        /* The slot has this process's pid until it is empty. If this process is killed before, the slot is a dead process's again. */
        if (!__atomic_compare_exchange_n(head, &seen, p->pid, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) continue;
        bool same = s->gpu->stack == stack; /* else the process has freed the slot in between, and taken it again */
        if (same) empty_slot(i);
        __atomic_store_n(head, same ? 0 : seen, __ATOMIC_RELEASE);
        freed += same;
    }
    return freed;
}

/* If a slot already has this process's pid, it is from before an exec, or a dead process had the same pid. If the stacks differ, the slot
 * is freed, and the search for a free slot begins behind it, because the agent may be emptying it for some microseconds. Otherwise the slot
 * is taken again. */
static void claim_slot(void) {
    struct stat_fields self = stat_of("self");
    uint64_t own = pid_namespace(), stack = self.pid == process.pid ? self.stack : 0;
    uint32_t index = GM_SLOTS, next = 0;
    for (uint32_t i = 0, n = (uint32_t)gm_slots(); i < n && index == GM_SLOTS; i++) {
        struct gm_use_slot *s = &process.use->slot[i];
        if (__atomic_load_n(&s->pid, __ATOMIC_ACQUIRE) != process.pid || s->pid_namespace != own) continue;
        if (s->state && s->gpu->stack && stack && s->gpu->stack != stack) next = i + 1;
        else index = i;
    }
    if (next) gm_reap_slots();
    for (uint32_t tried = 0; tried < GM_SLOTS && index == GM_SLOTS; tried++) {
        uint32_t none = 0, i = (next + tried) % GM_SLOTS;
        if (__atomic_compare_exchange_n(&process.use->slot[i].pid, &none, process.pid, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) index = i;
    }
    process.slot_index = index;
    process.slot = index < GM_SLOTS ? &process.use->slot[index] : NULL;
    if (!process.slot) return;
    uint32_t slots = __atomic_load_n(&process.use->slots, __ATOMIC_RELAXED);
    while (slots <= index && !__atomic_compare_exchange_n(&process.use->slots, &slots, index + 1, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
    empty_slot((int)index);
    process.slot->pid_namespace = own;
    process.slot->gpu->stack = stack;
    __atomic_store_n(&process.slot->state, GM_ACTIVE, __ATOMIC_RELEASE);
}

static void in_child(void) {
    if (atomic_load(&state) == GM_ACTIVE) atomic_store(&state, GM_FREE);
    atomic_store(&starting, 0);
    for (int i = 0; i < DEVICES; i++) atomic_store(&gpu_of[i], 0);
    process.slot = NULL;
    gm_gate_after_fork();
    gm_streams_after_fork();
}

static struct gm_process *start(void) {
    static atomic_bool registered;
    if (atomic_load(&state) == GM_DISABLED) return NULL;
    int none = 0;
    while (!atomic_compare_exchange_strong(&starting, &none, 1)) { /* another thread maps the pages: microseconds */
        none = 0;
        sched_yield();
    }
    if (atomic_load(&state) == GM_ACTIVE) {
        atomic_store(&starting, 0);
        return &process;
    }
    if (!process.limits) process.limits = map(PLACE "limits" GM_SUFFIX, sizeof(struct gm_limits), false);
    if (process.limits && !process.use) process.use = map(PLACE "use" GM_SUFFIX, sizeof(struct gm_use), true);
    if (process.use && !process.turn) process.turn = map(PLACE "turn" GM_SUFFIX, sizeof(struct gm_turn), true);
    if (process.turn) {
        if (!atomic_exchange(&registered, true)) pthread_atfork(NULL, NULL, in_child);
        process.pid = (uint32_t)getpid();
        claim_slot();
        if (!process.slot && gm_reap_slots()) claim_slot();
        if (!process.slot)
            say("gets no GPU memory that is limited", PLACE "use" GM_SUFFIX, "all slots of the container are taken", "end other processes that use CUDA");
        atomic_store(&gm_suspend_word, &process.limits->suspend);
        atomic_store(&state, GM_ACTIVE);
    }
    atomic_store(&starting, 0);
    return process.turn ? &process : NULL;
}

struct gm_process *gm_process(void) { return atomic_load_explicit(&state, memory_order_acquire) == GM_ACTIVE ? &process : start(); }

int gm_gpu_of_device(CUdevice device) {
    struct gm_process *p = gm_process();
    if (!p || device < 0 || device >= DEVICES) return -1;
    int known = atomic_load_explicit(&gpu_of[device], memory_order_relaxed); /* 0: not asked; else the index plus 2, 1: not limited */
    if (known) return known - 2;
    uint8_t uuid[16] = {0};
    CUresult r = ASK(cuDeviceGetUuid_v2, (uint8_t *, CUdevice), uuid, device);
    if (r == CUDA_ERROR_NOT_FOUND) r = ASK(cuDeviceGetUuid, (uint8_t *, CUdevice), uuid, device);
    if (r != CUDA_SUCCESS) return -1;
    uint32_t gpus = p->limits->gpus < GM_GPUS ? p->limits->gpus : GM_GPUS;
    int index = -1;
    for (uint32_t g = 0; g < gpus; g++)
        if (!memcmp(p->limits->gpu[g].uuid, uuid, sizeof uuid)) index = (int)g;
    atomic_store(&gpu_of[device], index + 2);
    return index;
}

CUdevice gm_current_device(void) {
    CUdevice device;
    return ASK(cuCtxGetDevice, (CUdevice *), &device) == CUDA_SUCCESS ? device : -1;
}
int gm_current_gpu(void) { return gm_process() ? gm_gpu_of_device(gm_current_device()) : -1; }

static CUresult exchange(int *mode) { return ASK(cuThreadExchangeStreamCaptureMode, (int *), mode); }
int gm_relax(void) {
    int mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED */
    return exchange(&mode) == CUDA_SUCCESS ? mode : -1;
}
void gm_unrelax(int previous) {
    if (previous >= 0) exchange(&previous);
}
