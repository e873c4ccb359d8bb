/* A simulated libnvidia-ml.so.1: the NVML ABI over two text files in the folder of this library.
 *
 *   node.txt     the hardware of the node; read at nvmlInit (a node changes only when its driver is loaded again)
 *   control.txt  the present faults and load, and what callers have set; read again when it was changed
 *   control.lock  held with flock for each change of control.txt; its first 8 bytes count the changes
 *   sessions.lock  held with a shared flock by each process that has NVML initialised
 *
 * Each line has a verb, a subject and a value (gpumgr/sim/library.py and control.py define and write them).
 * The folder is found through dladdr, so every copy of this library is a separate node, and any process can load it.
 * Functions that an old driver lacks are exported, too, and return FUNCTION_NOT_FOUND: for a binding this equals a missing function.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_GPUS = 64, MAX_LINKS = 36, MAX_PROCESSES = 1024, MAX_FAULTS = 256, MAX_EVENTS = 64, MAX_SETS = 64, MAX_LIMITS = 512, MAX_INSTANCES = 8, MAX_PROFILES = 10, MAX_MPS = 256 };
enum { MAX_CGROUP = 512, MAX_LINE = 1024 };

typedef enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, RESET_REQUIRED = 16, OPERATING_SYSTEM = 17, LIB_RM_VERSION_MISMATCH = 18,
    IN_USE = 19, INSUFFICIENT_RESOURCES = 23, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
} result_t;

enum { EVENT_DOUBLE_BIT_ECC = 0x2, EVENT_XID = 0x8, SUPPORTED_EVENTS = 0xff9f }; /* the event types of an H200 with driver 580 */
enum { FIELD_ECC_DOUBLE_BIT_VOLATILE = 4, FIELD_REMAPPED_FIRST = 142, FIELD_REMAPPED_LAST = 145, FIELD_RECOVERY_ACTION = 230 };

/* ---- structures of the ABI ------------------------------------------------------------------------------------------- */

typedef struct { char bus_id_legacy[16]; unsigned domain, bus, device, pci_device_id, pci_subsystem_id; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; unsigned long long timestamp; unsigned sm, memory, encoder, decoder; } process_sample_t;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; unsigned type; int result; union { unsigned ui; unsigned long long ull; } value; } field_t;
typedef struct { unsigned version, sensor; int celsius; } temperature_t;
typedef struct { unsigned start, size; } placement_t;
typedef struct { unsigned id, p2p, slices, instances, multiprocessors, copy, decoder, encoder, jpeg, ofa; unsigned long long memory_mib; } profile_info_t;
typedef struct { unsigned version, id, p2p, slices, instances, multiprocessors, copy, decoder, encoder, jpeg, ofa; unsigned long long memory_mib; char name[96]; } profile_info_v2_t;
typedef struct { void *device; unsigned id, profile; placement_t placement; } gpu_instance_info_t;
typedef struct { unsigned id, slices, instances, multiprocessors, copy, decoder, encoder, jpeg, ofa; } compute_profile_info_t;
typedef struct { void *device, *gpu_instance; unsigned id, profile; placement_t placement; } compute_instance_info_t;
typedef struct { const char *cgroup; unsigned long long soft, hard; } set_limits_t;
typedef struct { const char *cgroup; unsigned long long soft, hard, used; } get_limits_t;

typedef struct { char function[64]; int gpu; int code; } refusal_t;

/* ---- the content of the two files ------------------------------------------------------------------------------------ */

typedef enum { LINK_NONE = 0, LINK_GPU, LINK_SWITCH, LINK_OFF } link_kind_t;
typedef struct { link_kind_t kind; char bus_id[32]; } link_t;

typedef struct { unsigned multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; unsigned long long memory_mib; } attributes_t;

/* A MIG device. Without a UUID the index is unused. With the UUID "-" it is a GPU instance without a compute instance, which is no MIG
 * device. memory_slices: slice n as bit n; 0 = the driver does not report them. */
typedef struct { char uuid[96], profile[32]; unsigned gpu_instance, compute_instance, memory_slices; attributes_t attributes; } instance_t;

/* A GPU instance profile; starts: the memory slices at which it may begin, slice n as bit n. */
typedef struct { char name[32]; unsigned number, id, slices, size, starts, instances; unsigned long long memory_mib; } profile_t;

typedef struct {
    char uuid[96], bus_id[32], name[96];
    unsigned minor, celsius, milliwatts;
    int numa_node, mig; /* mig: -1 = the GPU has none */
    unsigned long long total, reserved;
    int level[MAX_GPUS];
    link_t link[MAX_LINKS];
    instance_t instance[MAX_INSTANCES];
    profile_t profile[MAX_PROFILES];
    int profiles;
} gpu_t;

/* A process. mig: the hash of its MIG device's UUID, 0 = none; server: the pid of its MPS server, 0 = it is not an MPS client. */
typedef struct { unsigned pid; long long used; unsigned sm, mig, server; } running_t;

typedef struct {
    int lost, mig, mig_set, mig_pending, mig_needs_reset, recovery, grow, compute_mode; /* mig, mig_set, mig_pending: -1 = not set */
    long long used; /* -1 = the sum of the processes */
    unsigned celsius, milliwatts, busy, memory_busy;
    unsigned long long double_bit_errors;
    running_t running[MAX_PROCESSES], mps[MAX_MPS]; /* mps: servers and their clients as the file declares them */
    int processes, mps_processes;
    int remade; /* whether `instance` replaces the node's list */
    instance_t instance[MAX_INSTANCES];
} state_t;

typedef struct { char function[64]; int gpu; } hang_t;
typedef struct { unsigned long long number; int gpu; unsigned long long type, data; unsigned gpu_instance; } fault_event_t;
typedef struct { int gpu; char cgroup[MAX_CGROUP]; unsigned long long soft, hard; } limit_t;

static struct {
    char driver[64], nvml[64];
    int cuda, gpus, absents, refusals;
    char absent[MAX_FAULTS][64];
    refusal_t refusal[MAX_FAULTS]; /* what the GPUs do not support */
    gpu_t gpu[MAX_GPUS];
} node;

static struct {
    unsigned long generation;
    int loaded;
    char driver[64];
    state_t gpu[MAX_GPUS];
    refusal_t refusal[MAX_FAULTS];
    hang_t hang[MAX_FAULTS];
    fault_event_t event[MAX_EVENTS];
    limit_t limit[MAX_LIMITS];
    int refusals, hangs, events, limits;
} control;

static struct { int open; unsigned long long seen; unsigned long long types[MAX_GPUS]; } sets[MAX_SETS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;            /* calls of nvmlInit minus calls of nvmlShutdown */
static unsigned long session;      /* the generation in control.txt at nvmlInit; a reload of the driver makes the session stale */
static int presence = -1;          /* sessions.lock, locked for sharing while initialised: a program that resets GPUs finds this process there */
static char native_version[64];    /* the driver's version in the first session: this library belongs to it */
static int asked_for_size[MAX_GPUS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)((ms - 1000.0 * (long)(ms / 1000)) * 1e6)};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

static const char *folder(void) {
    static char path[PATH_MAX];
    if (!*path) {
        Dl_info info;
        if (!dladdr((void *)&folder, &info) || !realpath(info.dli_fname, path)) return ".";
        char *slash = strrchr(path, '/');
        if (slash) *slash = 0;
    }
    return path;
}

static FILE *open_beside(const char *name) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    return fopen(path, "re");
}

static unsigned hash_of(const char *text) {
    unsigned hash = 2166136261u;
    while (*text) hash = (hash ^ (unsigned char)*text++) * 16777619u;
    return hash;
}

static int read_instance(instance_t *list, const char *text) {
    instance_t m = {0};
    unsigned slot;
    if (sscanf(text, "%u %95s %u %u %llu %u %u %31s %u", &slot, m.uuid, &m.gpu_instance, &m.compute_instance, &m.attributes.memory_mib,
               &m.attributes.gpu_slices, &m.attributes.compute_slices, m.profile, &m.memory_slices) < 8 || slot >= MAX_INSTANCES) return 0;
    list[slot] = m;
    return 1;
}

/* ---- node.txt -------------------------------------------------------------------------------------------------------- */

static void read_node_gpu(const char *text) {
    gpu_t g = {0};
    int i, used = 0;
    if (sscanf(text, "%d %95s %31s %u %llu %llu %d %d %u %u %n", &i, g.uuid, g.bus_id, &g.minor, &g.total, &g.reserved, &g.numa_node,
               &g.mig, &g.celsius, &g.milliwatts, &used) < 10 || i < 0 || i >= MAX_GPUS) return;
    snprintf(g.name, sizeof g.name, "%.90s", text + used);
    node.gpu[i] = g;
    if (node.gpus <= i) node.gpus = i + 1;
}

static void read_node_link(const char *text) {
    int i, n;
    char kind[16], bus_id[32] = "";
    if (sscanf(text, "%d %d %15s %31s", &i, &n, kind, bus_id) < 3 || i < 0 || i >= MAX_GPUS || n < 0 || n >= MAX_LINKS) return;
    link_t *link = &node.gpu[i].link[n];
    link->kind = !strcmp(kind, "gpu") ? LINK_GPU : !strcmp(kind, "switch") ? LINK_SWITCH : LINK_OFF;
    strcpy(link->bus_id, bus_id);
}

static void read_node_profile(const char *text) {
    profile_t p = {0};
    int i;
    if (sscanf(text, "%d %u %u %u %u %u %u %llu %31s", &i, &p.number, &p.id, &p.slices, &p.size, &p.starts, &p.instances, &p.memory_mib, p.name) < 9) return;
    if (i >= 0 && i < MAX_GPUS && node.gpu[i].profiles < MAX_PROFILES) node.gpu[i].profile[node.gpu[i].profiles++] = p;
}

static int read_node(void) {
    FILE *file = open_beside("node.txt");
    if (!file) return 0;
    memset(&node, 0, sizeof node);
    char line[512], verb[32];
    int used, a, b, level;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%31s %n", verb, &used) != 1) continue;
        const char *rest = line + used;
        if (!strcmp(verb, "driver")) snprintf(node.driver, sizeof node.driver, "%.60s", rest);
        else if (!strcmp(verb, "nvml")) snprintf(node.nvml, sizeof node.nvml, "%.60s", rest);
        else if (!strcmp(verb, "cuda")) node.cuda = atoi(rest);
        else if (!strcmp(verb, "gpu")) read_node_gpu(rest);
        else if (!strcmp(verb, "link")) read_node_link(rest);
        else if (!strcmp(verb, "profile")) read_node_profile(rest);
        else if (!strcmp(verb, "instance") && sscanf(rest, "%d %n", &a, &used) == 1 && a >= 0 && a < MAX_GPUS)
            read_instance(node.gpu[a].instance, rest + used);
        else if (!strcmp(verb, "without") && node.absents < MAX_FAULTS) snprintf(node.absent[node.absents++], 64, "%.60s", rest);
        else if (!strcmp(verb, "unsupported") && node.refusals < MAX_FAULTS && sscanf(rest, "%d %63s", &a, node.refusal[node.refusals].function) == 2)
            node.refusal[node.refusals].gpu = a, node.refusal[node.refusals++].code = NOT_SUPPORTED;
        else if (!strcmp(verb, "level") && sscanf(rest, "%d %d %d", &a, &b, &level) == 3 && a >= 0 && a < MAX_GPUS && b >= 0 && b < MAX_GPUS)
            node.gpu[a].level[b] = node.gpu[b].level[a] = level;
    }
    fclose(file);
    return 1;
}

/* ---- control.txt ----------------------------------------------------------------------------------------------------- */

static void calm(void) {
    memset(&control, 0, sizeof control);
    control.loaded = 1;
    for (int i = 0; i < MAX_GPUS; i++) {
        control.gpu[i].mig = control.gpu[i].mig_set = control.gpu[i].mig_pending = -1;
        control.gpu[i].used = -1;
        asked_for_size[i] = 0;
    }
}

static void read_gpu_fact(const char *verb, const char *rest) {
    int i, used = 0;
    long long value = 0, second = 0, third = 0;
    char device[96] = "";
    if (sscanf(rest, "%d %n", &i, &used) != 1 || i < 0 || i >= MAX_GPUS) return;
    int words = sscanf(rest + used, "%lld %lld %lld %95s", &value, &second, &third, device);
    state_t *g = &control.gpu[i];
    if (!strcmp(verb, "lost")) g->lost = 1;
    else if (!strcmp(verb, "mig")) g->mig = (int)value;
    else if (!strcmp(verb, "migmode")) g->mig_set = (int)value;
    else if (!strcmp(verb, "migpending")) g->mig_pending = (int)value;
    else if (!strcmp(verb, "migreset")) g->mig_needs_reset = 1;
    else if (!strcmp(verb, "remade")) g->remade = 1;
    else if (!strcmp(verb, "instance")) read_instance(g->instance, rest + used);
    else if (!strcmp(verb, "recovery")) g->recovery = (int)value;
    else if (!strcmp(verb, "grow")) g->grow = (int)value;
    else if (!strcmp(verb, "computemode")) g->compute_mode = (int)value;
    else if (!strcmp(verb, "ecc")) g->double_bit_errors = (unsigned long long)value;
    else if (!strcmp(verb, "memory")) g->used = value;
    else if (!strcmp(verb, "temperature")) g->celsius = (unsigned)value;
    else if (!strcmp(verb, "power")) g->milliwatts = (unsigned)value;
    else if (!strcmp(verb, "utilization")) g->busy = (unsigned)value, g->memory_busy = (unsigned)second;
    else if (!strcmp(verb, "process") && words >= 3 && g->processes < MAX_PROCESSES)
        g->running[g->processes++] = (running_t){(unsigned)value, second, (unsigned)third, *device ? hash_of(device) : 0, 0};
    else if (!strcmp(verb, "mpsserver") && words >= 2 && g->mps_processes < MAX_MPS) g->mps[g->mps_processes++] = (running_t){.pid = (unsigned)value, .used = second};
    else if (!strcmp(verb, "mpsclient") && words >= 2 && g->mps_processes < MAX_MPS) g->mps[g->mps_processes++] = (running_t){.pid = (unsigned)value, .server = (unsigned)second};
}

static running_t *running_with(state_t *g, unsigned pid) {
    for (int p = 0; p < g->processes; p++)
        if (g->running[p].pid == pid) return &g->running[p];
    return NULL;
}

/* Puts MPS servers and clients among the GPU's processes, and moves the clients' utilization to their servers: under MPS a driver (580 on
 * H200) has samples of the server only. */
static void join_mps(state_t *g) {
    for (int n = 0; n < g->mps_processes; n++) {
        running_t *r = running_with(g, g->mps[n].pid);
        if (!r && g->processes < MAX_PROCESSES) *(r = &g->running[g->processes++]) = g->mps[n];
        if (r) r->server = g->mps[n].server;
    }
    for (int p = 0; p < g->processes; p++) {
        running_t *r = &g->running[p], *server = r->server ? running_with(g, r->server) : NULL;
        if (server) server->sm = server->sm + r->sm > 100 ? 100 : server->sm + r->sm;
        if (r->server) r->sm = 0;
    }
}

static void read_hang(const char *rest) {
    hang_t h;
    if (control.hangs < MAX_FAULTS && sscanf(rest, "%63s %d", h.function, &h.gpu) == 2) control.hang[control.hangs++] = h;
}

static void read_fact(const char *verb, const char *rest) {
    refusal_t refusal;
    fault_event_t e;
    limit_t limit;
    if (!strcmp(verb, "generation")) control.generation = strtoul(rest, NULL, 10);
    else if (!strcmp(verb, "loaded")) control.loaded = atoi(rest);
    else if (!strcmp(verb, "driver")) snprintf(control.driver, sizeof control.driver, "%.60s", rest);
    else if (!strcmp(verb, "hang")) read_hang(rest);
    else if (!strcmp(verb, "result")) {
        if (control.refusals < MAX_FAULTS && sscanf(rest, "%63s %d %d", refusal.function, &refusal.gpu, &refusal.code) == 3)
            control.refusal[control.refusals++] = refusal;
    } else if (!strcmp(verb, "event")) {
        if (control.events < MAX_EVENTS && sscanf(rest, "%llu %d %llu %llu %u", &e.number, &e.gpu, &e.type, &e.data, &e.gpu_instance) == 5)
            control.event[control.events++] = e;
    } else if (!strcmp(verb, "memorylimit")) {
        if (control.limits < MAX_LIMITS && sscanf(rest, "%d %511s %llu %llu", &limit.gpu, limit.cgroup, &limit.soft, &limit.hard) == 4)
            control.limit[control.limits++] = limit;
    } else read_gpu_fact(verb, rest);
}

/* The number of changes of control.txt, in memory that all programs of this node share; NULL if that is not possible. */
static volatile unsigned long long *changes(void) {
    static void *shared;
    if (shared) return shared == MAP_FAILED ? NULL : shared;
    char path[PATH_MAX + 32];
    struct stat s;
    snprintf(path, sizeof path, "%s/control.lock", folder());
    int file = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    int large = file >= 0 && !fstat(file, &s) && (s.st_size >= 8 || !ftruncate(file, 8));
    shared = large ? mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0) close(file);
    return changes();
}

static double looked_at; /* when refresh() last looked at the file; 0 = it must look now */

/* Reads control.txt if it was changed since the last read. Programs that change it count their changes, so a call makes no system call;
 * the file itself is looked at a few times a second, because a person may edit it. */
static void refresh(void) {
    static struct stat last;
    static int known;
    static unsigned long long counted;
    char path[PATH_MAX + 32], line[MAX_LINE], verb[32];
    struct stat s;
    volatile unsigned long long *count = changes();
    if (count && *count == counted && looked_at && now() - looked_at < 0.25) return;
    if (count) counted = *count; /* before the file, so that a change after this is seen by the next call */
    looked_at = now();
    snprintf(path, sizeof path, "%s/control.txt", folder());
    if (stat(path, &s)) memset(&s, 0, sizeof s);
    if (known && s.st_ino == last.st_ino && s.st_size == last.st_size && s.st_mtim.tv_sec == last.st_mtim.tv_sec &&
        s.st_mtim.tv_nsec == last.st_mtim.tv_nsec) return;
    known = 1;
    last = s;
    calm();
    FILE *file = fopen(path, "re");
    if (!file) return;
    int used;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%31s %n", verb, &used) == 1) read_fact(verb, line + used);
    }
    fclose(file);
    for (int i = 0; i < MAX_GPUS; i++) join_mps(&control.gpu[i]);
}

/* Takes the lock that control.py takes for its changes, and reads the file. The file does not change until end_turn. */
static int take_turn(void) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/control.lock", folder());
    int turn = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    if (turn >= 0) flock(turn, LOCK_EX);
    looked_at = 0;
    refresh();
    return turn;
}

/* Releases the lock of take_turn. If `result` is OK, first replaces the lines that begin with one of the subjects (up to NULL) by `text`,
 * atomically. */
static result_t end_turn(int turn, result_t result, const char *const *subjects, const char *text) {
    char path[PATH_MAX + 32], fresh_path[PATH_MAX + 32], line[MAX_LINE];
    if (turn < 0) return OPERATING_SYSTEM;
    if (!result) {
        snprintf(path, sizeof path, "%s/control.txt", folder());
        snprintf(fresh_path, sizeof fresh_path, "%s/control.new", folder());
        FILE *old = open_beside("control.txt"), *fresh = fopen(fresh_path, "we");
        while (old && fresh && fgets(line, sizeof line, old)) {
            int replaced = 0;
            for (int n = 0; subjects[n]; n++) replaced |= !strncmp(line, subjects[n], strlen(subjects[n]));
            if (!replaced) fputs(line, fresh);
        }
        int kept = fresh && fputs(text, fresh) >= 0;
        if (fresh && fclose(fresh)) kept = 0;
        if (old) fclose(old);
        result = kept && !rename(fresh_path, path) ? OK : OPERATING_SYSTEM;
        if (changes()) ++*changes();
    }
    close(turn);
    refresh();
    return result;
}

static result_t keep_fact(const char *subject, const char *value) {
    char text[MAX_LINE];
    snprintf(text, sizeof text, "%s%s\n", subject, value);
    return end_turn(take_turn(), OK, (const char *const[]){subject, NULL}, text);
}

/* ---- the beginning and the end of every call ------------------------------------------------------------------------- */

static int concerns(const char *rule, const char *function) { return !strcmp(rule, "*") || !strcmp(rule, function); }

/* The GPU that this thread's call is about; -1 = none, EVERY_GPU = all: the call hangs if calls about one of them do. */
enum { EVERY_GPU = -2 };
static __thread int subject;

static int hanging(const char *function) {
    for (int n = 0; n < control.hangs; n++) {
        const hang_t *h = &control.hang[n];
        if (concerns(h->function, function) && (h->gpu < 0 || h->gpu == subject || subject == EVERY_GPU)) return 1;
    }
    return 0;
}

static result_t refused(const char *function, int gpu) {
    for (int i = 0; i < node.absents; i++)
        if (!strcmp(node.absent[i], function)) return FUNCTION_NOT_FOUND;
    for (int i = 0; i < node.refusals; i++)
        if (node.refusal[i].gpu == gpu && !strcmp(node.refusal[i].function, function)) return (result_t)node.refusal[i].code;
    for (int i = 0; i < control.refusals; i++) {
        refusal_t *r = &control.refusal[i];
        if (concerns(r->function, function) && (r->gpu < 0 || r->gpu == gpu)) return (result_t)r->code;
    }
    return OK;
}

/* Takes the lock, reads control.txt, and applies its faults, except for faults of the driver as a whole (driver_state). */
static result_t arrive(const char *function, int gpu) {
    pthread_mutex_lock(&lock);
    refresh();
    subject = gpu;
    while (hanging(function)) {
        pthread_mutex_unlock(&lock);
        sleep_ms(2);
        pthread_mutex_lock(&lock);
        refresh();
    }
    return refused(function, gpu);
}

static result_t leave(result_t result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static result_t driver_state(void) {
    if (!control.loaded) return DRIVER_NOT_LOADED;
    return initialised && session == control.generation ? OK : UNINITIALIZED;
}

static int index_of(const void *device) {
    const gpu_t *g = device;
    return g >= node.gpu && g < node.gpu + node.gpus ? (int)(g - node.gpu) : -1;
}

/* Handles of MIG devices, GPU instances and compute instances are addresses in these arrays. */
static char mig_handle[MAX_GPUS * MAX_INSTANCES], gpu_instance_handle[MAX_GPUS * MAX_INSTANCES], compute_instance_handle[MAX_GPUS * MAX_INSTANCES];

static int slot_in(const char *handles, const void *handle) {
    const char *h = handle;
    return h >= handles && h < handles + sizeof mig_handle ? (int)(h - handles) : -1;
}

static int mig_of(int i) {
    state_t *g = &control.gpu[i];
    return g->mig >= 0 ? g->mig : g->mig_set >= 0 ? g->mig_set : node.gpu[i].mig;
}

static instance_t *instances_of(int i) { return control.gpu[i].remade ? control.gpu[i].instance : node.gpu[i].instance; }
static int is_device(const instance_t *m) { return *m->uuid && strcmp(m->uuid, "-"); }

/* The GPU instance at this index of the handles, or NULL. */
static instance_t *gpu_instance_at(int slot) {
    if (slot < 0 || mig_of(slot / MAX_INSTANCES) != 1) return NULL;
    instance_t *m = instances_of(slot / MAX_INSTANCES) + slot % MAX_INSTANCES;
    return *m->uuid ? m : NULL;
}

/* The MIG device at this index of the handles, or NULL. */
static instance_t *instance_at(int slot) {
    instance_t *m = gpu_instance_at(slot);
    return m && is_device(m) ? m : NULL;
}

/* Every function begins with one of these; on OK the lock is held and `leave` must follow. */
#define ENTER(gpu) do { result_t r_ = arrive(__func__, gpu); if (!r_) r_ = driver_state(); if (r_) return leave(r_); } while (0)
#define ENTER_GPU(device)                                                                                                                  \
    int i = index_of(device);                                                                                                              \
    do {                                                                                                                                   \
        result_t r_ = arrive(__func__, i);                                                                                                 \
        if (!r_) r_ = driver_state();                                                                                                      \
        if (!r_) r_ = i < 0 ? INVALID_ARGUMENT : control.gpu[i].lost ? GPU_IS_LOST : OK;                                                   \
        if (r_) return leave(r_);                                                                                                          \
    } while (0)

/* The same for a MIG device `m`. With `gpus_too` the handle may be a GPU's; then `m` is NULL. */
#define ENTER_MIG(device, gpus_too)                                                                                                        \
    int slot = slot_in(mig_handle, device), i = slot >= 0 ? slot / MAX_INSTANCES : index_of(device);                                                   \
    instance_t *m = NULL;                                                                                                                  \
    do {                                                                                                                                   \
        result_t r_ = arrive(__func__, i);                                                                                                 \
        if (!r_) r_ = driver_state();                                                                                                      \
        if (!r_) m = instance_at(slot);                                                                                                    \
        if (!r_) r_ = i < 0 || (!m && (slot >= 0 || !(gpus_too))) ? INVALID_ARGUMENT : control.gpu[i].lost ? GPU_IS_LOST : OK;              \
        if (r_) return leave(r_);                                                                                                          \
    } while (0)

/* The same for the handle of a GPU instance or of a compute instance. */
#define ENTER_PART(handles, handle, at)                                                                                                    \
    int slot = slot_in(handles, handle), i = slot < 0 ? -1 : slot / MAX_INSTANCES;                                                         \
    instance_t *m = NULL;                                                                                                                  \
    do {                                                                                                                                   \
        result_t r_ = arrive(__func__, i);                                                                                                 \
        if (!r_) r_ = driver_state();                                                                                                      \
        if (!r_) m = at(slot);                                                                                                             \
        if (!r_) r_ = !m ? INVALID_ARGUMENT : control.gpu[i].lost ? GPU_IS_LOST : OK;                                                      \
        if (r_) return leave(r_);                                                                                                          \
    } while (0)

static result_t put_text(char *buffer, unsigned length, const char *text) {
    if (!buffer) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return OK;
}

/* ---- the library as a whole ------------------------------------------------------------------------------------------ */

static void show_presence(void) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/sessions.lock", folder());
    if (presence < 0) presence = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    if (presence >= 0) flock(presence, LOCK_SH);
}

static result_t init(const char *function) {
    result_t r = arrive(function, -1);
    if (r) return leave(r);
    if (!control.loaded) return leave(DRIVER_NOT_LOADED);
    if (initialised && session == control.generation) {
        initialised++;
        return leave(OK);
    }
    if (!read_node()) return leave(DRIVER_NOT_LOADED);
    if (*control.driver) strcpy(node.driver, control.driver);
    if (!*native_version) strcpy(native_version, node.driver);
    if (strcmp(native_version, node.driver)) return leave(LIB_RM_VERSION_MISMATCH);
    r = refused(function, -1); /* again: which functions the node lacks is known only after node.txt was read */
    if (r) return leave(r);
    memset(sets, 0, sizeof sets);
    show_presence();
    initialised = 1;
    session = control.generation;
    return leave(OK);
}

EXPORT result_t nvmlInitWithFlags(unsigned flags) { (void)flags; return init(__func__); }
EXPORT result_t nvmlInit_v2(void) { return init(__func__); }

EXPORT result_t nvmlShutdown(void) {
    result_t r = arrive(__func__, -1);
    if (!r && !initialised) r = UNINITIALIZED;
    if (!r && --initialised == 0) {
        memset(sets, 0, sizeof sets);
        if (presence >= 0) close(presence);
        presence = -1;
    }
    return leave(r);
}

EXPORT const char *nvmlErrorString(result_t result) {
    switch (result) {
    case OK: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires reset";
    case OPERATING_SYSTEM: return "Operating System call failed";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case IN_USE: return "In use by another client";
    case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT result_t nvmlSystemGetDriverVersion(char *text, unsigned length) { ENTER(-1); return leave(put_text(text, length, node.driver)); }
EXPORT result_t nvmlSystemGetNVMLVersion(char *text, unsigned length) { ENTER(-1); return leave(put_text(text, length, node.nvml)); }
EXPORT result_t nvmlSystemGetCudaDriverVersion(int *version) { ENTER(-1); *version = node.cuda; return leave(OK); }
EXPORT result_t nvmlSystemGetCudaDriverVersion_v2(int *version) { ENTER(-1); *version = node.cuda; return leave(OK); }
EXPORT result_t nvmlDeviceGetCount_v2(unsigned *count) { ENTER(-1); *count = (unsigned)node.gpus; return leave(OK); }

/* ---- handles and identity -------------------------------------------------------------------------------------------- */

static result_t give_handle(const char *function, int i, void **device) {
    if (i < 0) return NOT_FOUND;
    if (control.gpu[i].lost) return GPU_IS_LOST;
    result_t r = refused(function, i);
    if (!r) *device = &node.gpu[i];
    return r;
}

EXPORT result_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ENTER((int)index);
    return leave(index >= (unsigned)node.gpus ? INVALID_ARGUMENT : give_handle(__func__, (int)index, device));
}

EXPORT result_t nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    ENTER(EVERY_GPU); /* NVML may initialise other GPUs as it searches for the UUID */
    int found = -1;
    for (int i = 0; uuid && i < node.gpus; i++)
        if (!strcmp(node.gpu[i].uuid, uuid)) found = i;
    for (int slot = 0; uuid && found < 0 && slot < node.gpus * MAX_INSTANCES; slot++)
        if (instance_at(slot) && !strcmp(instance_at(slot)->uuid, uuid)) {
            result_t r = give_handle(__func__, slot / MAX_INSTANCES, device);
            if (!r) *device = mig_handle + slot;
            return leave(r);
        }
    return leave(give_handle(__func__, found, device));
}

EXPORT result_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) {
    ENTER(-1);
    int found = -1;
    for (int i = 0; bus_id && i < node.gpus; i++)
        if (!strcasecmp(node.gpu[i].bus_id, bus_id) || !strcasecmp(node.gpu[i].bus_id + 4, bus_id)) found = i;
    return leave(give_handle(__func__, found, device));
}

EXPORT result_t nvmlDeviceGetUUID(void *d, char *text, unsigned length) {
    ENTER_MIG(d, 1);
    return leave(put_text(text, length, m ? m->uuid : node.gpu[i].uuid));
}

EXPORT result_t nvmlDeviceGetName(void *d, char *text, unsigned length) {
    ENTER_MIG(d, 1);
    char name[160];
    snprintf(name, sizeof name, m ? "%s MIG %s" : "%s", node.gpu[i].name, m ? m->profile : "");
    return leave(put_text(text, length, name));
}

EXPORT result_t nvmlDeviceGetMinorNumber(void *d, unsigned *minor) { ENTER_GPU(d); *minor = node.gpu[i].minor; return leave(OK); }

EXPORT result_t nvmlDeviceGetNumaNodeId(void *d, unsigned *numa) {
    ENTER_GPU(d);
    if (node.gpu[i].numa_node < 0) return leave(NOT_SUPPORTED);
    *numa = (unsigned)node.gpu[i].numa_node;
    return leave(OK);
}

static void put_pci(pci_t *pci, const char *bus_id) {
    memset(pci, 0, sizeof *pci);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", bus_id);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%.15s", bus_id + 4); /* without the first four digits of the domain */
}

EXPORT result_t nvmlDeviceGetPciInfo_v3(void *d, pci_t *pci) { ENTER_GPU(d); put_pci(pci, node.gpu[i].bus_id); return leave(OK); }

EXPORT result_t nvmlDeviceGetMigMode(void *d, unsigned *current, unsigned *pending) {
    ENTER_GPU(d);
    if (node.gpu[i].mig < 0) return leave(NOT_SUPPORTED);
    *current = (unsigned)mig_of(i);
    *pending = control.gpu[i].mig_pending >= 0 ? (unsigned)control.gpu[i].mig_pending : *current;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *count) {
    ENTER_GPU(d);
    *count = mig_of(i) == 1 ? MAX_INSTANCES : 0;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned index, void **device) {
    ENTER_GPU(d);
    if (index >= MAX_INSTANCES) return leave(INVALID_ARGUMENT);
    int slot = i * MAX_INSTANCES + (int)index;
    *device = mig_handle + slot;
    return leave(instance_at(slot) ? OK : NOT_FOUND);
}

EXPORT result_t nvmlDeviceGetGpuInstanceId(void *d, unsigned *id) { ENTER_MIG(d, 0); *id = m->gpu_instance; return leave(OK); }
EXPORT result_t nvmlDeviceGetComputeInstanceId(void *d, unsigned *id) { ENTER_MIG(d, 0); *id = m->compute_instance; return leave(OK); }
EXPORT result_t nvmlDeviceGetAttributes_v2(void *d, attributes_t *attributes) {
    ENTER_MIG(d, 1);
    if (!m) return leave(NOT_SUPPORTED);
    *attributes = m->attributes;
    return leave(OK);
}

EXPORT result_t nvmlDeviceSetMigMode(void *d, unsigned mode, result_t *status) {
    ENTER_GPU(d);
    char text[64], subjects[3][32];
    state_t *g = &control.gpu[i];
    int turn = take_turn(), made = 0;
    for (int n = 0; n < MAX_INSTANCES; n++) made |= *instances_of(i)[n].uuid;
    result_t r = node.gpu[i].mig < 0 ? NOT_SUPPORTED : mode > 1 ? INVALID_ARGUMENT : !mode && mig_of(i) && made ? IN_USE : OK;
    *status = (int)mode == mig_of(i) ? OK : g->processes ? IN_USE : g->mig_needs_reset ? RESET_REQUIRED : OK;
    snprintf(subjects[0], sizeof subjects[0], "migpending %d ", i);
    snprintf(subjects[1], sizeof subjects[1], "migmode %d ", i);
    snprintf(subjects[2], sizeof subjects[2], "mig %d ", i);
    snprintf(text, sizeof text, "%s%u\n", subjects[*status ? 0 : 1], mode);
    return leave(end_turn(turn, r, (const char *const[]){subjects[0], *status ? NULL : subjects[1], subjects[2], NULL}, text));
}

/* ---- GPU instances and compute instances ----------------------------------------------------------------------------- */

static unsigned bits(unsigned mask) { return (unsigned)__builtin_popcount(mask); }
static unsigned mask_of(placement_t p) { return ((1u << p.size) - 1) << p.start; }
static placement_t place_of(unsigned mask) { return (placement_t){mask ? (unsigned)__builtin_ctz(mask) : 0, bits(mask)}; }

/* The GPU's profile with this number of NVML or, if `by_id`, with this id of the driver; or NULL. */
static profile_t *profile_of(int i, unsigned number, int by_id) {
    for (int n = 0; n < node.gpu[i].profiles; n++)
        if ((by_id ? node.gpu[i].profile[n].id : node.gpu[i].profile[n].number) == number) return &node.gpu[i].profile[n];
    return NULL;
}

/* The profile of a GPU instance; NULL if its place is not known. */
static profile_t *profile_at(int i, const instance_t *m) {
    for (int n = 0; n < node.gpu[i].profiles; n++) {
        profile_t *p = &node.gpu[i].profile[n];
        if (p->slices == m->attributes.gpu_slices && p->size == bits(m->memory_slices)) return p;
    }
    return NULL;
}

static result_t no_profile(unsigned number) { return number < 18 ? NOT_SUPPORTED : INVALID_ARGUMENT; }

EXPORT result_t nvmlDeviceGetGpuInstanceProfileInfo(void *d, unsigned number, profile_info_t *info) {
    ENTER_GPU(d);
    profile_t *p = profile_of(i, number, 0);
    if (!p) return leave(no_profile(number));
    *info = (profile_info_t){.id = p->id, .slices = p->slices, .instances = p->instances, .memory_mib = p->memory_mib};
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetGpuInstanceProfileInfoV(void *d, unsigned number, profile_info_v2_t *info) {
    ENTER_GPU(d);
    profile_t *p = profile_of(i, number, 0);
    if (!p) return leave(no_profile(number));
    if (info->version != (sizeof *info | 2u << 24)) return leave(ARGUMENT_VERSION_MISMATCH);
    *info = (profile_info_v2_t){.id = p->id, .slices = p->slices, .instances = p->instances, .memory_mib = p->memory_mib};
    snprintf(info->name, sizeof info->name, "MIG %s", p->name);
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *d, unsigned id, placement_t *list, unsigned *count) {
    ENTER_GPU(d);
    profile_t *p = profile_of(i, id, 1);
    if (!p) return leave(node.gpu[i].mig < 0 ? NOT_SUPPORTED : INVALID_ARGUMENT);
    *count = 0;
    for (unsigned start = 0; p->starts >> start; start++) {
        if (!(p->starts >> start & 1)) continue;
        if (list) list[*count] = (placement_t){start, p->size};
        ++*count;
    }
    return leave(OK);
}

/* Writes the GPU's MIG devices and GPU instances, as a caller has changed them, to control.txt. */
static result_t keep_instances(int turn, result_t result, int i, const instance_t *list) {
    char text[MAX_INSTANCES * 320], remade[32], instance[32];
    snprintf(remade, sizeof remade, "remade %d ", i);
    snprintf(instance, sizeof instance, "instance %d ", i);
    int used = snprintf(text, sizeof text, "%s2\n", remade);
    for (int n = 0; n < MAX_INSTANCES; n++) {
        const instance_t *m = &list[n];
        const attributes_t *a = &m->attributes;
        if (*m->uuid)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%d %s %u %u %llu %u %u %s %u\n", instance, n, m->uuid, m->gpu_instance,
                             m->compute_instance, a->memory_mib, a->gpu_slices, a->compute_slices, m->profile, m->memory_slices);
    }
    return end_turn(turn, result, (const char *const[]){remade, instance, NULL}, text);
}

static result_t add_gpu_instance(instance_t *list, int i, unsigned id, placement_t place, int *slot) {
    profile_t *p = profile_of(i, id, 1);
    unsigned numbers = 1; /* the ids in use; none is 0 */
    if (mig_of(i) != 1) return NOT_SUPPORTED;
    if (!p || place.size != p->size || place.start > 31 || !(p->starts >> place.start & 1)) return INVALID_ARGUMENT;
    for (int n = MAX_INSTANCES - 1; n >= 0; n--) {
        if (list[n].memory_slices & mask_of(place)) return INSUFFICIENT_RESOURCES;
        if (*list[n].uuid) numbers |= 1u << list[n].gpu_instance;
        else *slot = n;
    }
    if (*slot < 0) return INSUFFICIENT_RESOURCES;
    instance_t m = {.uuid = "-", .gpu_instance = (unsigned)__builtin_ctz(~numbers), .memory_slices = mask_of(place)};
    m.attributes = (attributes_t){.gpu_slices = p->slices, .compute_slices = p->slices, .memory_mib = p->memory_mib};
    strcpy(m.profile, p->name);
    list[*slot] = m;
    return OK;
}

EXPORT result_t nvmlDeviceCreateGpuInstanceWithPlacement(void *d, unsigned id, const placement_t *place, void **made) {
    ENTER_GPU(d);
    instance_t list[MAX_INSTANCES];
    int slot = -1, turn = take_turn();
    memcpy(list, instances_of(i), sizeof list);
    result_t r = keep_instances(turn, add_gpu_instance(list, i, id, *place, &slot), i, list);
    if (!r) *made = gpu_instance_handle + i * MAX_INSTANCES + slot;
    return leave(r);
}

EXPORT result_t nvmlGpuInstanceDestroy(void *handle) {
    ENTER_PART(gpu_instance_handle, handle, gpu_instance_at);
    instance_t list[MAX_INSTANCES];
    unsigned id = m->gpu_instance;
    result_t r = OK;
    int turn = take_turn();
    memcpy(list, instances_of(i), sizeof list);
    for (int n = 0; n < MAX_INSTANCES; n++) {
        if (!*list[n].uuid || list[n].gpu_instance != id) continue;
        if (is_device(&list[n])) r = IN_USE;
        memset(&list[n], 0, sizeof list[n]);
    }
    return leave(keep_instances(turn, r, i, list));
}

EXPORT result_t nvmlDeviceGetGpuInstances(void *d, unsigned id, void **list, unsigned *count) {
    ENTER_GPU(d);
    if (mig_of(i) != 1) return leave(NOT_SUPPORTED);
    *count = 0;
    for (int n = 0; n < MAX_INSTANCES; n++) {
        instance_t *m = gpu_instance_at(i * MAX_INSTANCES + n);
        if (m && profile_at(i, m) && profile_at(i, m)->id == id) list[(*count)++] = gpu_instance_handle + i * MAX_INSTANCES + n;
    }
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetGpuInstanceById(void *d, unsigned id, void **instance) {
    ENTER_GPU(d);
    if (mig_of(i) != 1) return leave(NOT_SUPPORTED);
    for (int slot = i * MAX_INSTANCES; slot < (i + 1) * MAX_INSTANCES; slot++) {
        if (!gpu_instance_at(slot) || gpu_instance_at(slot)->gpu_instance != id) continue;
        *instance = gpu_instance_handle + slot;
        return leave(OK);
    }
    return leave(NOT_FOUND);
}

EXPORT result_t nvmlGpuInstanceGetInfo(void *handle, gpu_instance_info_t *info) {
    ENTER_PART(gpu_instance_handle, handle, gpu_instance_at);
    profile_t *p = profile_at(i, m);
    if (!p) return leave(NOT_SUPPORTED);
    *info = (gpu_instance_info_t){&node.gpu[i], m->gpu_instance, p->id, place_of(m->memory_slices)};
    return leave(OK);
}

/* The slices of the compute instance profiles by NVML's number, which is also the driver's id here. */
static const unsigned compute_slices[] = {1, 2, 3, 4, 7, 8, 6};

EXPORT result_t nvmlGpuInstanceGetComputeInstanceProfileInfo(void *handle, unsigned number, unsigned engines, compute_profile_info_t *info) {
    ENTER_PART(gpu_instance_handle, handle, gpu_instance_at);
    if (number > 8 || engines) return leave(INVALID_ARGUMENT);
    if (number > 6 || compute_slices[number] > m->attributes.gpu_slices) return leave(NOT_SUPPORTED);
    *info = (compute_profile_info_t){.id = number, .slices = compute_slices[number], .instances = 1};
    return leave(OK);
}

/* The UUID of a MIG device is computed from GPU, GPU instance and compute instance, as by NVIDIA's driver: NVIDIA's MIG guide shows the same
 * UUID for two such devices. */
static void put_uuid(int i, instance_t *m) {
    unsigned r[4];
    for (int n = 0; n < 4; n++) {
        char name[160];
        snprintf(name, sizeof name, "%d %s %u %u", n, node.gpu[i].uuid, m->gpu_instance, m->compute_instance);
        r[n] = hash_of(name);
    }
    snprintf(m->uuid, sizeof m->uuid, "MIG-%08x-%04x-%04x-%04x-%04x%08x", r[0], r[1] >> 16, r[1] & 0xffff, r[2] >> 16, r[2] & 0xffff, r[3]);
}

/* Only compute instances of the whole GPU instance are simulated. */
EXPORT result_t nvmlGpuInstanceCreateComputeInstance(void *handle, unsigned id, void **made) {
    ENTER_PART(gpu_instance_handle, handle, gpu_instance_at);
    instance_t list[MAX_INSTANCES];
    int turn = take_turn();
    memcpy(list, instances_of(i), sizeof list);
    m = &list[slot % MAX_INSTANCES];
    result_t r = id > 6 || compute_slices[id] != m->attributes.gpu_slices ? INVALID_ARGUMENT : is_device(m) ? INSUFFICIENT_RESOURCES : OK;
    put_uuid(i, m);
    r = keep_instances(turn, r, i, list);
    if (!r) *made = compute_instance_handle + slot;
    return leave(r);
}

EXPORT result_t nvmlComputeInstanceDestroy(void *handle) {
    ENTER_PART(compute_instance_handle, handle, instance_at);
    instance_t list[MAX_INSTANCES];
    result_t r = OK;
    int turn = take_turn();
    memcpy(list, instances_of(i), sizeof list);
    m = &list[slot % MAX_INSTANCES];
    for (int p = 0; p < control.gpu[i].processes; p++)
        if (control.gpu[i].running[p].mig == hash_of(m->uuid)) r = IN_USE;
    strcpy(m->uuid, "-");
    return leave(keep_instances(turn, r, i, list));
}

EXPORT result_t nvmlGpuInstanceGetComputeInstanceById(void *handle, unsigned id, void **instance) {
    ENTER_PART(gpu_instance_handle, handle, gpu_instance_at);
    for (int n = i * MAX_INSTANCES; n < (i + 1) * MAX_INSTANCES; n++) {
        if (!instance_at(n) || instance_at(n)->gpu_instance != m->gpu_instance || instance_at(n)->compute_instance != id) continue;
        *instance = compute_instance_handle + n;
        return leave(OK);
    }
    return leave(NOT_FOUND);
}

EXPORT result_t nvmlComputeInstanceGetInfo_v2(void *handle, compute_instance_info_t *info) {
    ENTER_PART(compute_instance_handle, handle, instance_at);
    *info = (compute_instance_info_t){mig_handle + slot, gpu_instance_handle + slot, m->compute_instance, 0, {0, m->attributes.compute_slices}};
    return leave(OK);
}

/* ---- the topology ---------------------------------------------------------------------------------------------------- */

#define ENTER_PAIR(a, b)                                                                                                                   \
    int j = index_of(b);                                                                                                                   \
    leave(arrive(__func__, j)); /* a call about two GPUs hangs if it hangs for one */                                                                    \
    ENTER_GPU(a);                                                                                                                          \
    do { if (j < 0 || control.gpu[j].lost) return leave(j < 0 ? INVALID_ARGUMENT : GPU_IS_LOST); } while (0)

EXPORT result_t nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) {
    ENTER_PAIR(a, b);
    *level = node.gpu[i].level[j];
    return leave(OK);
}

EXPORT result_t nvmlDeviceOnSameBoard(void *a, void *b, int *same) {
    ENTER_PAIR(a, b);
    *same = node.gpu[i].level[j] == 0;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) {
    ENTER_PAIR(a, b);
    (void)index;
    *status = node.gpu[i].level[j] < 50 ? 0 : 3; /* OK below the sockets' interconnect, else "topology" */
    return leave(OK);
}

#define ENTER_LINK(d, n)                                                                                                                   \
    ENTER_GPU(d);                                                                                                                          \
    do {                                                                                                                                   \
        if ((n) >= MAX_LINKS) return leave(INVALID_ARGUMENT);                                                                              \
        if (node.gpu[i].link[n].kind == LINK_NONE) return leave(NOT_SUPPORTED);                                                            \
    } while (0)

EXPORT result_t nvmlDeviceGetNvLinkState(void *d, unsigned n, unsigned *active) {
    ENTER_LINK(d, n);
    *active = node.gpu[i].link[n].kind != LINK_OFF;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned n, unsigned *type) {
    ENTER_LINK(d, n);
    link_kind_t kind = node.gpu[i].link[n].kind;
    *type = kind == LINK_GPU ? 0 : kind == LINK_SWITCH ? 2 : 255;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned n, pci_t *pci) {
    ENTER_LINK(d, n);
    if (node.gpu[i].link[n].kind == LINK_OFF) return leave(NOT_SUPPORTED);
    put_pci(pci, node.gpu[i].link[n].bus_id);
    return leave(OK);
}

/* ---- utilization and processes --------------------------------------------------------------------------------------- */

static unsigned long long used_memory(int i) {
    state_t *g = &control.gpu[i];
    if (g->used >= 0) return (unsigned long long)g->used;
    unsigned long long sum = 0;
    for (int p = 0; p < g->processes; p++)
        if (g->running[p].used > 0) sum += (unsigned long long)g->running[p].used;
    return sum;
}

EXPORT result_t nvmlDeviceGetMemoryInfo(void *d, memory_t *m) {
    ENTER_GPU(d);
    m->total = node.gpu[i].total;
    m->used = used_memory(i) + node.gpu[i].reserved;
    m->free = m->total - m->used;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2_t *m) {
    ENTER_GPU(d);
    if (m->version != (sizeof *m | 2u << 24)) return leave(ARGUMENT_VERSION_MISMATCH);
    m->total = node.gpu[i].total;
    m->reserved = node.gpu[i].reserved;
    m->used = used_memory(i);
    m->free = m->total - m->reserved - m->used;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetUtilizationRates(void *d, utilization_t *u) {
    ENTER_GPU(d);
    *u = (utilization_t){control.gpu[i].busy, control.gpu[i].memory_busy};
    return leave(OK);
}

static unsigned celsius(int i) { return control.gpu[i].celsius ? control.gpu[i].celsius : node.gpu[i].celsius; }

EXPORT result_t nvmlDeviceGetTemperature(void *d, int sensor, unsigned *value) {
    ENTER_GPU(d);
    if (sensor) return leave(INVALID_ARGUMENT);
    *value = celsius(i);
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetTemperatureV(void *d, temperature_t *t) { ENTER_GPU(d); t->celsius = (int)celsius(i); return leave(OK); }

EXPORT result_t nvmlDeviceGetPowerUsage(void *d, unsigned *milliwatts) {
    ENTER_GPU(d);
    *milliwatts = control.gpu[i].milliwatts ? control.gpu[i].milliwatts : node.gpu[i].milliwatts;
    return leave(OK);
}

/* The processes of a GPU, or of its MIG device `m`; `clients`: only those of MPS servers. */
static result_t put_processes(int i, const instance_t *m, unsigned *count, process_t *list, int clients) {
    state_t *g = &control.gpu[i];
    unsigned n = 0, room = *count, extra = 0;
    if (!m && !clients) {
        /* "grow": processes that start between the caller's first call, for the size, and the call for the list */
        extra = g->grow > 0 && asked_for_size[i] ? (unsigned)g->grow : 0;
        asked_for_size[i] = 1;
    }
    for (unsigned p = 0; p < (unsigned)g->processes + extra; p++) {
        running_t newcomer = {900000 + p, 1 << 20, 0, 0, 0}, *r = p < (unsigned)g->processes ? &g->running[p] : &newcomer;
        if ((m && r->mig != hash_of(m->uuid)) || (clients && !r->server)) continue;
        if (list && n < room) list[n] = (process_t){r->pid, r->used < 0 ? ~0ULL : (unsigned long long)r->used, ~0U, ~0U};
        n++;
    }
    *count = n;
    return n && (!list || room < n) ? INSUFFICIENT_SIZE : OK;
}

#define LISTS(name, answer)                                                                                                                \
    EXPORT result_t name##_v2(void *d, unsigned *n, process_t *list) { ENTER_MIG(d, 1); return leave(answer); }                            \
    EXPORT result_t name##_v3(void *d, unsigned *n, process_t *list) { ENTER_MIG(d, 1); return leave(answer); }

LISTS(nvmlDeviceGetComputeRunningProcesses, put_processes(i, m, n, list, 0))
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, put_processes(i, m, n, list, 1))
LISTS(nvmlDeviceGetGraphicsRunningProcesses, ((void)list, (void)m, *n = 0, OK))

static result_t put_samples(int i, process_sample_t *list, unsigned *count, unsigned long long since) {
    state_t *g = &control.gpu[i];
    unsigned n = 0, room = *count;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    unsigned long long stamp = (unsigned long long)t.tv_sec * 1000000 + (unsigned long long)t.tv_nsec / 1000;
    for (int p = 0; p < g->processes; p++) {
        if (!g->running[p].sm) continue;
        if (list && n < room) list[n] = (process_sample_t){g->running[p].pid, stamp, g->running[p].sm, 0, 0, 0};
        n++;
    }
    *count = n;
    if (!n || stamp <= since) return NOT_FOUND;
    return list && room >= n ? OK : INSUFFICIENT_SIZE;
}

EXPORT result_t nvmlDeviceGetProcessUtilization(void *d, process_sample_t *list, unsigned *count, unsigned long long since) {
    ENTER_GPU(d);
    return leave(put_samples(i, list, count, since));
}

/* ---- settings of administrators -------------------------------------------------------------------------------------- */

EXPORT result_t nvmlDeviceGetComputeMode(void *d, int *mode) { ENTER_GPU(d); *mode = control.gpu[i].compute_mode; return leave(OK); }

EXPORT result_t nvmlDeviceSetComputeMode(void *d, int mode) {
    ENTER_GPU(d);
    char subject[64], value[16];
    if (mode < 0 || mode > 3) return leave(INVALID_ARGUMENT);
    if (mode == 1) return leave(NOT_SUPPORTED); /* exclusive thread, long removed */
    snprintf(subject, sizeof subject, "computemode %d ", i);
    snprintf(value, sizeof value, "%d", mode);
    return leave(keep_fact(subject, value));
}

/* The kernel gives a cgroup this file if its parent enables the dmem controller. In a plain folder that replaces a cgroup no file appears. */
static int has_limit_file(const char *cgroup) {
    char path[MAX_CGROUP + 32], enabled[256] = "";
    snprintf(path, sizeof path, "%s/dmem.max", cgroup);
    if (!access(path, F_OK)) return 1;
    snprintf(path, sizeof path, "%s", cgroup);
    char *slash = strrchr(path, '/');
    if (!slash || slash == path) return 0;
    strcpy(slash, "/cgroup.subtree_control");
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    if (!fgets(enabled, sizeof enabled, f)) enabled[0] = 0;
    fclose(f);
    return strstr(enabled, "dmem") != NULL;
}

/* Whether memory can be limited on the GPU. A GPU with MIG has no limits. */
static result_t may_limit(int i, const char *cgroup) {
    struct stat s;
    if (mig_of(i) > 0) return NOT_SUPPORTED;
    if (!cgroup || *cgroup != '/' || strlen(cgroup) >= MAX_CGROUP || strpbrk(cgroup, " \t\n")) return INVALID_ARGUMENT;
    return stat(cgroup, &s) || !S_ISDIR(s.st_mode) ? NOT_FOUND : OK;
}

EXPORT result_t nvmlDeviceSetMemoryLimits_v1(void *d, const set_limits_t *l) {
    ENTER_GPU(d);
    char subject[MAX_CGROUP + 64], value[64];
    result_t r = l ? may_limit(i, l->cgroup) : INVALID_ARGUMENT;
    if (!r && !has_limit_file(l->cgroup)) r = NOT_FOUND; /* the dmem controller is not enabled for it */
    if (r) return leave(r);
    snprintf(subject, sizeof subject, "memorylimit %d %s ", i, l->cgroup);
    snprintf(value, sizeof value, "%llu %llu", l->soft, l->hard);
    return leave(keep_fact(subject, value));
}

/* A cgroup without limit file has the limits of its nearest ancestor with one. Use is not simulated. */
EXPORT result_t nvmlDeviceGetMemoryLimits_v1(void *d, get_limits_t *l) {
    ENTER_GPU(d);
    char cgroup[MAX_CGROUP];
    result_t r = l ? may_limit(i, l->cgroup) : INVALID_ARGUMENT;
    if (r) return leave(r);
    strcpy(cgroup, l->cgroup);
    while (*cgroup && !has_limit_file(cgroup)) *strrchr(cgroup, '/') = 0;
    if (!*cgroup) return leave(NOT_SUPPORTED);
    l->soft = l->used = 0;
    l->hard = ~0ULL;
    for (int n = 0; n < control.limits; n++)
        if (control.limit[n].gpu == i && !strcmp(control.limit[n].cgroup, cgroup))
            l->soft = control.limit[n].soft, l->hard = control.limit[n].hard;
    return leave(OK);
}

/* ---- health ---------------------------------------------------------------------------------------------------------- */

EXPORT result_t nvmlDeviceGetTotalEccErrors(void *d, int type, int counter, unsigned long long *count) {
    ENTER_GPU(d);
    (void)counter;
    *count = type == 1 ? control.gpu[i].double_bit_errors : 0;
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetFieldValues(void *d, int count, field_t *fields) {
    ENTER_GPU(d);
    for (int n = 0; n < count; n++) {
        fields[n].result = OK;
        fields[n].type = 1;
        if (fields[n].field == FIELD_RECOVERY_ACTION) fields[n].value.ui = (unsigned)control.gpu[i].recovery;
        else if (fields[n].field == FIELD_ECC_DOUBLE_BIT_VOLATILE) fields[n].type = 3, fields[n].value.ull = control.gpu[i].double_bit_errors;
        else if (fields[n].field >= FIELD_REMAPPED_FIRST && fields[n].field <= FIELD_REMAPPED_LAST) fields[n].type = 3, fields[n].value.ull = 0;
        else fields[n].result = NOT_SUPPORTED;
    }
    return leave(OK);
}

EXPORT result_t nvmlDeviceGetSupportedEventTypes(void *d, unsigned long long *types) {
    ENTER_GPU(d);
    *types = SUPPORTED_EVENTS;
    return leave(OK);
}

static unsigned long long latest_event(void) {
    unsigned long long latest = 0;
    for (int e = 0; e < control.events; e++)
        if (control.event[e].number > latest) latest = control.event[e].number;
    return latest;
}

EXPORT result_t nvmlEventSetCreate(void **set) {
    ENTER(-1);
    for (int n = 0; n < MAX_SETS; n++) {
        if (sets[n].open) continue;
        memset(&sets[n], 0, sizeof sets[n]);
        sets[n].open = 1;
        sets[n].seen = latest_event(); /* earlier events are not delivered */
        *set = &sets[n];
        return leave(OK);
    }
    return leave(UNKNOWN);
}

static int set_of(const void *set) {
    for (int n = 0; n < MAX_SETS; n++)
        if (set == &sets[n] && sets[n].open) return n;
    return -1;
}

EXPORT result_t nvmlEventSetFree(void *set) {
    ENTER(-1);
    int n = set_of(set);
    if (n < 0) return leave(INVALID_ARGUMENT);
    sets[n].open = 0;
    return leave(OK);
}

EXPORT result_t nvmlDeviceRegisterEvents(void *d, unsigned long long types, void *set) {
    ENTER_GPU(d);
    int n = set_of(set);
    if (n < 0) return leave(INVALID_ARGUMENT);
    sets[n].types[i] |= types;
    return leave(OK);
}

/* The oldest event that was not delivered to this set; each is delivered once. */
static int next_event(int n, event_t *event) {
    fault_event_t *best = NULL;
    for (int e = 0; e < control.events; e++) {
        fault_event_t *candidate = &control.event[e];
        if (candidate->number <= sets[n].seen || candidate->gpu < 0 || candidate->gpu >= node.gpus) continue;
        if (!(sets[n].types[candidate->gpu] & candidate->type)) continue;
        if (!best || candidate->number < best->number) best = candidate;
    }
    if (!best) return 0;
    sets[n].seen = best->number;
    *event = (event_t){&node.gpu[best->gpu], best->type, best->data, best->gpu_instance, best->gpu_instance == ~0U ? ~0U : 0};
    return 1;
}

/* Waits without the lock until a file in the folder is replaced, or the time has passed. */
static void wait_for_change(int watch, double ms) {
    struct pollfd p = {watch, POLLIN, 0};
    char drained[4096];
    if (watch < 0) ms = ms < 10 ? ms : 10; /* without inotify: poll every 10 ms */
    if (poll(&p, watch < 0 ? 0 : 1, (int)ms + 1) > 0 && read(watch, drained, sizeof drained) < 0) sleep_ms(1);
}

static result_t wait_for_event(const char *function, void *set, event_t *event, unsigned timeout_ms, int watch) {
    double deadline = now() + timeout_ms / 1000.0;
    for (;;) {
        result_t r = arrive(function, -1);
        if (!r) r = driver_state();
        int n = set_of(set);
        if (!r && n < 0) r = INVALID_ARGUMENT;
        if (r) return leave(r);
        if (next_event(n, event)) return leave(OK);
        pthread_mutex_unlock(&lock);
        double left = deadline - now();
        if (left <= 0) return TIMEOUT;
        wait_for_change(watch, left * 1000);
        pthread_mutex_lock(&lock);
        looked_at = 0; /* the file was replaced; its writer may not have counted that yet */
        pthread_mutex_unlock(&lock);
    }
}

EXPORT result_t nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (watch >= 0 && inotify_add_watch(watch, folder(), IN_MOVED_TO) < 0) {
        close(watch);
        watch = -1;
    }
    result_t r = wait_for_event(__func__, set, event, timeout_ms, watch);
    if (watch >= 0) close(watch);
    return r;
}
