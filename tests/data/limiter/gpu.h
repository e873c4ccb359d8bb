/* The fake GPUs of a test in one shared file (FAKE_GPU): memory by process, and a model of time.
 *
 * Kernels of a context run one after the other, each for its own duration and on the whole GPU. Contexts with work take turns of
 * SLICE_NS; one that is alone keeps the GPU: so do programs on an H200 without MPS. The model's time is the model clock's (clock.h); it
 * is brought up to date by each call that looks at it. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "clock.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8, PROCESSES = 256, CONTEXTS = 256, RING = 4096, QUEUE = 1024, MEETINGS = 16 };
#define SLICE_NS 2000000LL
#define MIB (1024ULL * 1024)
#define CONTEXT_BYTES (518 * MIB) /* of an H200 with driver 580.159.04 */
#define MODULE_BYTES (4 * MIB)

struct work {
    int64_t left_ns, end_ns;
    uint32_t meeting, parties, round; /* starts when `parties` pieces of work with this number run, as a collective of NCCL */
};
struct context {
    int32_t pid; /* 0: free */
    int32_t device;
    uint64_t submitted, done;
    int64_t busy_ns;
    struct work ring[RING];
};
/* CUprocessState. The driver of a locked process waits at the entry of each call; the memory of a checkpointed one is not on the GPU. */
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
struct process {
    int32_t pid;
    int32_t state, next; /* from the first to the second at step_ends_ns; the driver of the process does it, so the caller may die */
    int64_t step_ends_ns;
    int32_t calls;       /* threads in the driver */
    int32_t unrestorable; /* a restore found too little memory: no later one works (driver 580.95) */
    uint64_t bytes[GPUS], context_bytes[GPUS], module_bytes[GPUS];
    uint64_t launches;
    int64_t busy_ns[GPUS];
};
struct gpu {
    char uuid[48];
    uint64_t total_bytes, reserved_bytes;
    int64_t at_ns, slice_end_ns, busy_ns;
    int32_t holder;
};
struct model {
    pthread_mutex_t lock;
    int32_t gpus;
    int32_t checkpoint_speed; /* times that of an H200 */
    uint32_t meeting_parties[MEETINGS];
    struct gpu gpu[GPUS];
    struct process process[PROCESSES];
    struct context context[CONTEXTS];
};

static struct model *model;

static inline int64_t gpu_now(void) {
    if (model_now) return model_now();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static inline void gpu_wait_until(int64_t at_ns) {
    if (model_wait_until) {
        model_wait_until(at_ns);
        return;
    }
    struct timespec t = {at_ns / 1000000000, at_ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}
static inline void gpu_lock(void) {
    if (pthread_mutex_lock(&model->lock) == EOWNERDEAD) pthread_mutex_consistent(&model->lock);
}
static inline void gpu_unlock(void) { pthread_mutex_unlock(&model->lock); }

static inline int gpu_open(void) {
    if (model) return 1;
    const char *path = getenv("FAKE_GPU");
    int fd = open(path ? path : "/fakegpu/model", O_RDWR | O_CLOEXEC);
    if (fd < 0) return 0;
    void *p = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return 0;
    model = p;
    return 1;
}

static inline int gpu_pending(int i, int device) {
    struct context *c = &model->context[i];
    return c->pid && c->device == device && c->done < c->submitted;
}
/* The next context with work after `from`, in turn; -1: none. */
static inline int gpu_next(int device, int from) {
    for (int k = 1; k <= CONTEXTS; k++)
        if (gpu_pending((from + k) % CONTEXTS, device)) return (from + k) % CONTEXTS;
    return -1;
}
static inline struct process *gpu_process(int pid, int make) {
    int none = -1;
    for (int i = 0; i < PROCESSES; i++) {
        if (model->process[i].pid == pid) return &model->process[i];
        if (!model->process[i].pid && none < 0) none = i;
    }
    if (!make || none < 0) return NULL;
    memset(&model->process[none], 0, sizeof(struct process));
    model->process[none].pid = pid;
    return &model->process[none];
}
/* Whether the work waits for its partners; it holds the GPU meanwhile. */
static inline int gpu_meets(struct work *w) {
    uint32_t *met = &model->meeting_parties[w->meeting], n = w->parties;
    if (!n) return 0;
    if (!w->round) w->round = ((*met)++ / n + 1) * n; /* so many have come when all of its round are there */
    return *met < w->round;
}
static inline void gpu_run(int device, int64_t now) {
    struct gpu *g = &model->gpu[device];
    while (g->at_ns < now) {
        int next = gpu_next(device, g->holder);
        if (next < 0) break;
        if (!gpu_pending(g->holder, device) || g->at_ns >= g->slice_end_ns) {
            if (next != g->holder) g->slice_end_ns = g->at_ns + SLICE_NS;
            g->holder = next;
        }
        struct context *c = &model->context[g->holder];
        struct work *w = &c->ring[c->done % RING];
        int waits = gpu_meets(w);
        int64_t run = now - g->at_ns;
        if (!waits && w->left_ns < run) run = w->left_ns;
        if (gpu_next(device, g->holder) != g->holder) {
            if (g->at_ns >= g->slice_end_ns) g->slice_end_ns = g->at_ns + SLICE_NS;
            if (g->slice_end_ns - g->at_ns < run) run = g->slice_end_ns - g->at_ns;
        }
        g->at_ns += run, g->busy_ns += run, c->busy_ns += run;
        struct process *p = gpu_process(c->pid, 0);
        if (p) p->busy_ns[device] += run;
        if (waits) continue;
        w->left_ns -= run;
        if (w->left_ns <= 0) w->end_ns = g->at_ns, c->done++;
    }
    g->at_ns = now;
}
/* Brings all GPUs up to date. Call with the lock. */
static inline void gpu_advance(void) {
    int64_t now = gpu_now(), step = INT64_MAX;
    for (int i = 0; i < MEETINGS; i++)
        if (model->meeting_parties[i]) step = 100000;
    for (int64_t at = model->gpu[0].at_ns; at < now;) {
        at = step < now - at ? at + step : now;
        for (int d = 0; d < model->gpus; d++) gpu_run(d, at);
    }
}

static inline int gpu_ended(int pid) {
    char path[64], text[512];
    if (kill(pid, 0) && errno == ESRCH) return 1;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return 1;
    text[n] = 0;
    char *state = strrchr(text, ')');
    return !state || state[2] == 'Z' || state[2] == 'X';
}
/* What a driver does when a process ends: its memory and its contexts are freed. Call with the lock. */
static inline void gpu_reap(void) {
    for (int i = 0; i < PROCESSES; i++)
        if (model->process[i].pid && gpu_ended(model->process[i].pid)) model->process[i].pid = 0;
    for (int i = 0; i < CONTEXTS; i++)
        if (model->context[i].pid && !gpu_process(model->context[i].pid, 0)) model->context[i].pid = 0;
}
static inline int gpu_state(const struct process *p) { return gpu_now() < p->step_ends_ns ? p->state : p->next; }
static inline uint64_t gpu_process_bytes(const struct process *p, int device) {
    if (gpu_state(p) == CHECKPOINTED && p->next == CHECKPOINTED) return 0;
    return p->bytes[device] + p->context_bytes[device] + p->module_bytes[device];
}
static inline uint64_t gpu_free_bytes(int device) {
    uint64_t used = model->gpu[device].reserved_bytes;
    for (int i = 0; i < PROCESSES; i++)
        if (model->process[i].pid) used += gpu_process_bytes(&model->process[i], device);
    return model->gpu[device].total_bytes > used ? model->gpu[device].total_bytes - used : 0;
}
