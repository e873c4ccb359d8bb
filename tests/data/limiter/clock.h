/* The model clock: one clock for all processes of a test, in a shared file, so that results do not depend on how busy the machine is.
 *
 * Time advances only when every thread that takes part waits: it then jumps to the earliest end of a wait. Computing takes no time;
 * the fake driver spends the time that a call would take. While no tenant is between model_enter and model_leave, the clock follows
 * the real one. Preloaded before libgpumgr.so (clock.c); without it, or without MODEL_CLOCK, all of this is real time. */
#pragma once
#include <stdint.h>

/* The caller takes part; the clock stops following real time when `tenants` threads have entered. */
extern void model_enter(int tenants) __attribute__((weak));
/* The caller no longer takes part: before it blocks in anything that the clock does not know, as a read. */
extern void model_leave(void) __attribute__((weak));
/* Stops the process as SIGSTOP does, but without a lock that others need; it takes part again when it continues. */
extern void model_stop(void) __attribute__((weak));
/* How many threads of the process take part. */
extern int model_threads(void) __attribute__((weak));
extern int64_t model_now(void) __attribute__((weak));
extern void model_wait_until(int64_t at_ns) __attribute__((weak));
