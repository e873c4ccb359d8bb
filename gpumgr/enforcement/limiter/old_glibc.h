/* Binds functions that moved from libdl and libpthread to libc in glibc 2.34 to their first version, so that the library loads with glibc
 * 2.17. */
#if defined(__x86_64__)
#define GM_FIRST "GLIBC_2.2.5"
#else
#define GM_FIRST "GLIBC_2.17"
#endif
#define GM_OLD(name) __asm__(".symver " #name ", " #name "@" GM_FIRST)
GM_OLD(dlopen);
GM_OLD(dlvsym);
GM_OLD(dladdr);
GM_OLD(pthread_create);
GM_OLD(pthread_detach);
GM_OLD(pthread_once);
GM_OLD(pthread_key_create);
GM_OLD(pthread_setspecific);
