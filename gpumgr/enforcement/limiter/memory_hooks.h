/* Hooks of memory.c, in the form of hooks.h. */
