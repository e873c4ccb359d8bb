// The checkpoint functions of libcuda, with the state of each process in a file: FAKE_CUDA/PID has the number of its state.
//
// Each call appends a line to FAKE_CUDA/calls. While FAKE_CUDA/wait-FUNCTION exists, the function does not return; FAKE_CUDA/fail-FUNCTION
// has lines "PID CODE" of the calls that fail.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_FOUND = 201, ILLEGAL_STATE = 401, LONGEST = 4096 };

static void place(char *path, const char *name) { snprintf(path, LONGEST, "%s/%s", getenv("FAKE_CUDA"), name); }

static int state_of(int pid, int *state)
{
    char path[LONGEST], name[32];
    snprintf(name, sizeof name, "%d", pid);
    place(path, name);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    int read = fscanf(file, "%d", state);
    fclose(file);
    return read == 1 ? 0 : NOT_FOUND;
}

static int change(const char *function, int pid, int before, int after)
{
    char path[LONGEST], name[64];
    place(path, "calls");
    FILE *file = fopen(path, "a");
    fprintf(file, "%s %d\n", function, pid);
    fclose(file);
    snprintf(name, sizeof name, "wait-%s", function);
    for (place(path, name); !access(path, F_OK);) usleep(1000);
    snprintf(name, sizeof name, "fail-%s", function);
    place(path, name);
    int whose, code, state;
    if ((file = fopen(path, "r"))) {
        while (fscanf(file, "%d %d", &whose, &code) == 2)
            if (whose == pid) return fclose(file), code;
        fclose(file);
    }
    if (state_of(pid, &state)) return NOT_FOUND;
    if (state != before) return ILLEGAL_STATE;
    char new[LONGEST];
    snprintf(name, sizeof name, "%d", pid);
    place(path, name);
    snprintf(new, sizeof new, "%s/.new-%d", getenv("FAKE_CUDA"), pid);
    file = fopen(new, "w");
    fprintf(file, "%d\n", after);
    fclose(file);
    return rename(new, path) ? NOT_FOUND : 0;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuCheckpointProcessGetState(int pid, int *state) { return state_of(pid, state); }
int cuCheckpointProcessLock(int pid, void *arguments) { return arguments ? change("Lock", pid, 0, 1) : 1; }
int cuCheckpointProcessCheckpoint(int pid, void *arguments) { return arguments ? change("Checkpoint", pid, 1, 2) : 1; }
int cuCheckpointProcessRestore(int pid, void *arguments) { return arguments ? change("Restore", pid, 2, 1) : 1; }
int cuCheckpointProcessUnlock(int pid, void *arguments) { return arguments ? change("Unlock", pid, 1, 0) : 1; }
