/* A libcuda with each hooked function of HOOKS: it returns what tells its arguments apart, or 1 if it has a wrapper. */

typedef unsigned long N;
#define ARGUMENTS N a, N b, N c, N d, N e, N f, N g, N h, N i, N j
#define PASS(name, ...) N name(ARGUMENTS) { return a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + 9*i + 10*j; }
#define HOOK(name, ...) N name(void) { return 1; }
#include HOOKS
