/* Which function both forms of cuGetProcAddress give for each name of NAMES, version and flag. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
static const char *const names[] = {
#include NAMES
};
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*ask)(const char *, void **, int, unsigned long long, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    int (*older)(const char *, void **, int, unsigned long long) = dlsym(cuda, "cuGetProcAddress");
    static const int versions[] = {3020, 11030, 11040, 11080, 12000, 12020, 12050, 12080, 13000, 13020, 13050};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        for (unsigned k = 0; k < 4 * sizeof versions / sizeof *versions; k++) {
            int version = versions[k / 4], flags = 2 * (k % 2);
            void *found = NULL;
            int r = k % 4 < 2 ? ask(names[i], &found, version, flags, NULL) : older(names[i], &found, version, flags);
            Dl_info where = {0};
            printf("%s %d %d %d", names[i], version, flags, r);
            if (found && dladdr(found, &where)) printf(" %s %s", where.dli_sname, where.dli_fname);
            puts("");
        }
    return 0;
}
