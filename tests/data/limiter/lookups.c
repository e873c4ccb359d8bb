/* Which functions a program finds with the limiter LIBRARY preloaded: a 1 for each look-up that is as it should be. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *own = dlopen(LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    void *(*ask)(void *, const char *) = dlsym, *wrapper = ask(RTLD_DEFAULT, "cuMemAlloc_v2");
    Dl_info where;
    printf("%d ", dladdr(wrapper, &where) && where.dli_fname && own && where.dli_fbase == *(void **)own);
    printf("%d ", ask(cuda, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(RTLD_NEXT, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(cuda, "cuMemAlloc_v3") == NULL && dlerror() != NULL);
    printf("%d\n", ask(cuda, "cuDriverGetVersion") != NULL);
    return 0;
}
