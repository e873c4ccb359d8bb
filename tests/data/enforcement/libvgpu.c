/* What gpumgr's probe asks of HAMi-core's library, without limits: exports the same functions, makes a region of layout v1.2.
 *
 *   cc -shared -fPIC -o libvgpu.so libvgpu.c
 * Wrong ones, as released builds were:
 *   -DHIDDEN    exports dlsym alone (a Release build)
 *   -DDIRTY     has version 1.1 and everything behind the first semaphore 32 bytes further (HAMi 2.8.1)
 *   -DOLD       has version 1.1 and the right places (HAMi 2.4.1 to 2.8.0)
 *   -DSLOW      waits (HAMi 2.8.0 waits for a lock); -DCRASH ends the process; -DNEEDS calls a function that no library has
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef HIDDEN
#define EXPORTED __attribute__((visibility("hidden")))
#else
#define EXPORTED
#endif
#ifdef DIRTY
#define SHIFT 32
#else
#define SHIFT 0
#endif
#if defined DIRTY || defined OLD
#define MINOR 1
#else
#define MINOR 2
#endif
#define SIZEOF (2008952 + SHIFT)

#define HOOK(name) EXPORTED int name(void) { return 0; }
HOOK(cuInit)
HOOK(cuGetProcAddress)
HOOK(cuMemAlloc_v2)
HOOK(cuMemAllocManaged)
HOOK(cuMemCreate)
HOOK(cuMemFree_v2)
HOOK(cuMemGetInfo_v2)
HOOK(cuDeviceTotalMem_v2)
HOOK(cuLaunchKernel)
HOOK(nvmlInit_v2)
HOOK(nvmlInit) /* of libcuda-control.so, which the same file stands in for */

void *dlsym(void *handle, const char *name) {
  static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
  void *(*real)(void *, const char *) = NULL;
  for (int i = 0; i < 3 && !real; i++) *(void **)&real = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  return real ? real(handle, name) : NULL;
}

#ifdef NEEDS
void function_of_no_library(void);
EXPORTED void never_called(void) { function_of_no_library(); }
#endif

static uint64_t of(const char *name, unsigned scale) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 10) * scale : 0;
}

EXPORTED uint64_t get_current_device_memory_limit(int device) {
  (void)device;
#ifdef SLOW
  pause();
#endif
#ifdef CRASH
  abort();
#endif
  char *region = calloc(1, SIZEOF + 1);
  int32_t head[] = {19920718, 1, MINOR, 0}, tail[] = {1, 1, 2, 1};
  uint64_t semaphore[] = {1, 128}, limit = of("CUDA_DEVICE_MEMORY_LIMIT_0", 1 << 20), cores = of("CUDA_DEVICE_SM_LIMIT_0", 1);
  memcpy(region, head, sizeof head);
  memcpy(region + 24, semaphore, sizeof semaphore);
  memcpy(region + 1600 + SHIFT, &limit, sizeof limit);
  memcpy(region + 1728 + SHIFT, &cores, sizeof cores);
  memcpy(region + 2008896 + SHIFT, tail, sizeof tail);
  memcpy(region + (SHIFT ? 56 : 2008920), semaphore, sizeof semaphore);
  int file = open(getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE"), O_RDWR | O_CREAT, 0666);
  if (file < 0 || write(file, region, SIZEOF + 1) != SIZEOF + 1) abort();
  close(file);
  free(region);
  return limit;
}
