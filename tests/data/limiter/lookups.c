/* Which functions a program finds with the limiter LIBRARY preloaded: a 1 for each look-up that is as it should be. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *(*ask)(void *, const char *) = dlsym;
    /* Without the driver, and with one that lacks the function. */
    printf("%d ", !ask(RTLD_DEFAULT, "cuMemAlloc_v2") && dlerror() && !ask(RTLD_NEXT, "cuMemAlloc_v2") && dlerror());
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *own = dlopen(LIBRARY, RTLD_NOW | RTLD_NOLOAD), *wrapper = ask(RTLD_DEFAULT, "cuMemAlloc_v2");
    printf("%d ", !ask(RTLD_DEFAULT, "cuMemsetD2D16_v2_ptds") && dlerror() && !ask(cuda, "cuMemsetD2D16_v2_ptds") && dlerror());
    Dl_info where;
    printf("%d ", dladdr(wrapper, &where) && where.dli_fname && own && where.dli_fbase == *(void **)own);
    printf("%d ", ask(cuda, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(RTLD_NEXT, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(cuda, "cuMemAlloc_v3") == NULL && dlerror() != NULL);
    printf("%d\n", ask(cuda, "cuDriverGetVersion") != NULL);
    return 0;
}
