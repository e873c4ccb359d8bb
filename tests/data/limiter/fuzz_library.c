/* Fuzzer of the library in a tenant: fuzz_library SEED ROUNDS SECONDS, with the library and the model clock preloaded and a GPU (FAKE_GPU).
 * In each round a process with pages of its own (./pages) allocates, frees, launches and asks, while a neighbour in its container
 * damages the pages that both can write. It must neither end nor hang, and must get no answer that the driver does not give; when the
 * pages are as new again, memory can be had. Prints the round that failed, with the seed that repeats it. */
#define _GNU_SOURCE
#include "clock.h"
#include "fuzz.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int R;
typedef uint64_t P;
typedef void *V;
#define FUNCTIONS(X) \
    X(cuInit, (unsigned)) X(cuDevicePrimaryCtxRetain, (V *, int)) X(cuCtxSetCurrent, (V)) X(cuMemAlloc_v2, (P *, size_t)) X(cuMemFree_v2, (P)) \
    X(cuMemGetInfo_v2, (size_t *, size_t *)) X(cuMemAllocAsync, (P *, size_t, V)) X(cuMemFreeAsync, (P, V)) X(cuStreamSynchronize, (V)) \
    X(cuModuleLoadData, (V *, const char *)) X(cuModuleGetFunction, (V *, V, const char *)) \
    X(cuLaunchKernel, (V, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, V, V *, V *))
#define DECLARE(name, arguments) static R(*name) arguments;
FUNCTIONS(DECLARE)
enum { HELD = 16, NO_MEMORY = 2, SECONDS = 60 };
static struct gm_use *use;
static struct gm_turn *turn;

static V mapped(const char *name, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "pages/%s.%d", name, GM_VERSION);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, (off_t)size)) exit(2);
    V at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) exit(2);
    return at;
}
static void renew(void) {
    memset(use, 0, sizeof *use), memset(turn, 0, sizeof *turn);
    use->magic = turn->magic = GM_MAGIC, use->version = turn->version = GM_VERSION;
}
static void make_pages(void) {
    struct gm_limits *limits = mapped("limits", sizeof *limits);
    use = mapped("use", sizeof *use), turn = mapped("turn", sizeof *turn);
    limits->magic = GM_MAGIC, limits->version = GM_VERSION, limits->gpus = 1;
    struct gm_limits_gpu *gpu = &limits->gpu[0];
    gpu->uuid[15] = 1, gpu->memory_bytes = 4ull << 30, gpu->context_bytes = 518ull << 20, gpu->share = gpu->ceiling = 50, gpu->quantum_us = 20000;
    renew();
    if (!fuzz(4)) limits->gpus = (uint32_t)fuzz_number(0);
    if (!fuzz(4)) fuzz_damage(&limits->gpu[0].share, sizeof *limits - offsetof(struct gm_limits, gpu[0].share), 0);
    munmap(limits, sizeof *limits);
}
static void damage(void) {
    uint64_t now = (uint64_t)model_now();
    switch (fuzz(6)) {
    case 0: fuzz_damage(&use->gpu[0], sizeof use->gpu, now); break;
    case 1: fuzz_damage(&use->slot[fuzz(4)], sizeof *use->slot, now); break;
    case 2: fuzz_damage(&turn->gpu[0], sizeof *turn->gpu, now); break;
    case 3: fuzz_damage(turn->gpu[0].word, 64, now); break;
    case 4: fuzz_damage(use, sizeof *use, now); break;
    default: fuzz_damage(turn, sizeof *turn, now);
    }
}
static int operation(P *held, V kernel) {
    int i = (int)fuzz(HELD);
    size_t available, total, size = fuzz(2) ? fuzz(8ull << 20) + 1 : fuzz(6ull << 30) + 1;
    switch (fuzz(4)) {
    case 0: return cuMemGetInfo_v2(&available, &total);
    case 1: return cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) || cuStreamSynchronize(NULL);
    default:
        if (held[i]) {
            P at = held[i];
            held[i] = 0;
            return i % 2 ? cuMemFree_v2(at) : cuMemFreeAsync(at, NULL);
        }
        R r = i % 2 ? cuMemAlloc_v2(&held[i], size) : cuMemAllocAsync(&held[i], size, NULL);
        if (r) held[i] = 0;
        return r == NO_MEMORY ? 0 : r;
    }
}
/* 0, or the number of the step that failed. */
static int round_of(uint64_t seed) {
    fuzz_state = seed;
    make_pages();
    alarm(SECONDS);
    V library = dlopen("libcuda.so.1", RTLD_NOW), context, module, kernel;
#define FIND(name, arguments) name = (R(*) arguments)dlsym(library, #name);
    FUNCTIONS(FIND)
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    if (cuModuleLoadData(&module, "") || cuModuleGetFunction(&kernel, module, "work_100000")) return 2;
    P held[HELD] = {0};
    for (int step = 0; step < 400; step++) {
        if (fuzz(2)) damage();
        if (operation(held, kernel)) return 3;
    }
    renew(); /* the count no longer has what is freed now */
    for (int i = 0; i < HELD; i++)
        if (held[i] && (i % 2 ? cuMemFree_v2(held[i]) : cuMemFreeAsync(held[i], NULL))) return 4;
    P at;
    return cuMemAlloc_v2(&at, 1 << 20) ? 5 : 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    uint64_t seed = strtoull(argv[1], NULL, 10), rounds = strtoull(argv[2], NULL, 10);
    for (time_t end = time(NULL) + atoi(argv[3]); rounds || time(NULL) < end; seed++, rounds -= rounds > 0) {
        pid_t child = fork();
        if (!child) _exit(round_of(seed));
        int status;
        waitpid(child, &status, 0);
        if (!status) continue;
        printf("seed %llu: step %d, signal %d\n", (unsigned long long)seed, WEXITSTATUS(status), WTERMSIG(status));
        return 1;
    }
    return 0;
}
