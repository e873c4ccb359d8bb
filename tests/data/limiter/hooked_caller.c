/* Calls each hooked function of HOOKS, first while the container of the pages beside it is suspended, and prints what is wrong. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
typedef unsigned long N;
static const struct { const char *name; int wrapped; } names[] = {
#define PASS(name, ...) {#name, 0},
#define HOOK(name, ...) {#name, 1},
#include HOOKS
};
static N (*function)(N, N, N, N, N, N, N, N, N, N);
static volatile int wrapped, ended;
static void *call(void *out) {
    *(N *)out = wrapped ? function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0) : function(1, 2, 3, 4, 5, 6, 7, 8, 9, 10);
    ended = 1;
    return NULL;
}
static volatile unsigned *page(const char *path) {
    return mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(path, O_RDWR), 0);
}
int main(void) {
    volatile unsigned *suspend = page("pages/limits.1") + 3, *request = page("pages/use.1") + 3;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        if (!strncmp(names[i].name, "nvml", 4)) continue;
        function = (N (*)(N, N, N, N, N, N, N, N, N, N))dlsym(cuda, names[i].name), wrapped = names[i].wrapped;
        for (int suspended = 1; suspended >= 0; suspended--) {
            pthread_t thread;
            N result = 0;
            *request = 0, *suspend = (unsigned)suspended, ended = 0;
            pthread_create(&thread, NULL, call, &result);
            while (suspended && !*request) usleep(100);
            if (suspended && ended) printf("%s did not wait\n", names[i].name);
            *suspend = 0;
            pthread_join(thread, NULL);
            if (result != (wrapped ? 1 : 385)) printf("%s: %lu\n", names[i].name, result);
            if (!suspended && *request) printf("%s asks\n", names[i].name);
        }
    }
    puts("end");
    return 0;
}
