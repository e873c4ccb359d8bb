/* Reads what libcuda-control.so reads, the way it does, and says so: for tests, on the host and inside a container.
 *
 *   vcuda_reader layout                  offsets and size of the struct
 *   vcuda_reader config [FOLDER]         the limits in FOLDER/vcuda.config (default /etc/vcuda)
 *   vcuda_reader pid PID... [FOLDER]     "PID yes" or "PID no" for each: whether pids.config has it, by binary search
 *   vcuda_reader register [CLIENT [FOLDER]]   runs CLIENT (default /usr/local/nvidia/bin/gpu-client) as the library does
 *
 * Exit status: 0, or 1 after a line on stderr; `register` ends with the client's own.
 */
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_PIDS = 1024 };

struct version { int major, minor; } __attribute__((packed, aligned(8)));

struct limits {
    char pod_uid[48];
    int limit;
    char reserved[4044];
    char container_name[FILENAME_MAX];
    char bus_id[16];
    uint64_t gpu_memory;
    int utilization;
    int hard_limit;
    struct version driver_version;
    int enable;
} __attribute__((packed, aligned(8)));

static int fail(const char *what, const char *path) {
    fprintf(stderr, "vcuda_reader: %s %s\n", what, path);
    return 1;
}

/* What one read of FOLDER/NAME gives; -1 if it can't be opened. */
static ssize_t read_once(const char *folder, const char *name, void *into, size_t room) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDONLY);
    if (fd < 0) return -1;
    ssize_t size = read(fd, into, room);
    close(fd);
    return size;
}

static int layout(void) {
#define OFFSET(field) printf(#field " %zu\n", offsetof(struct limits, field))
    OFFSET(pod_uid), OFFSET(limit), OFFSET(container_name), OFFSET(bus_id), OFFSET(gpu_memory), OFFSET(utilization);
    OFFSET(hard_limit), OFFSET(driver_version), OFFSET(enable);
    printf("size %zu\n", sizeof(struct limits));
    return 0;
}

static int read_limits(const char *folder, struct limits *limits) {
    return read_once(folder, "vcuda.config", limits, sizeof *limits) == (ssize_t)sizeof *limits;
}

static int config(const char *folder) {
    struct limits limits;
    if (!read_limits(folder, &limits)) return fail("no whole vcuda.config in", folder);
    printf("pod_uid %s\nlimit %d\ncontainer_name %s\nbus_id %s\ngpu_memory %llu\n", limits.pod_uid, limits.limit, limits.container_name,
        limits.bus_id, (unsigned long long)limits.gpu_memory);
    printf("utilization %d\nhard_limit %d\nenable %d\n", limits.utilization, limits.hard_limit, limits.enable);
    return 0;
}

static int compare(const void *a, const void *b) {
    int left = *(const int *)a, right = *(const int *)b;
    return (left > right) - (left < right);
}

static int search(int count, char **pids, const char *folder) {
    static int table[MOST_PIDS];
    ssize_t size = read_once(folder, "pids.config", table, sizeof table);
    if (size < 0) return fail("no pids.config in", folder);
    for (int at = 0; at < count; at++) {
        int pid = atoi(pids[at]);
        int *found = bsearch(&pid, table, (size_t)size / sizeof *table, sizeof *table, compare);
        printf("%d %s\n", pid, found ? "yes" : "no");
    }
    return 0;
}

static int enroll(const char *client, const char *folder) {
    struct limits limits;
    char socket_path[PATH_MAX];
    int status;
    if (!read_limits(folder, &limits)) return fail("no whole vcuda.config in", folder);
    snprintf(socket_path, sizeof socket_path, "%s/vcuda.sock", folder);
    pid_t child = fork();
    if (child < 0) return fail("can't fork for", client);
    if (child == 0) {
        execl(client, client, "--addr", socket_path, "--bus-id", limits.bus_id, "--pod-uid", limits.pod_uid, "--cont-name",
            limits.container_name, (char *)NULL);
        _exit(fail("can't run", client));
    }
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return fail("a signal ended", client);
    printf("client %d\n", WEXITSTATUS(status));
    return WEXITSTATUS(status);
}

static int is_path(const char *argument) { return strchr(argument, '/') != NULL; }

int main(int argc, char **argv) {
    const char *folder = "/etc/vcuda", *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "layout")) return layout();
    if (!strcmp(what, "config")) return config(argc > 2 ? argv[2] : folder);
    if (!strcmp(what, "pid") && argc > 2) {
        int with_folder = argc > 3 && is_path(argv[argc - 1]);
        return search(argc - 2 - with_folder, argv + 2, with_folder ? argv[argc - 1] : folder);
    }
    if (!strcmp(what, "register"))
        return enroll(argc > 2 ? argv[2] : "/usr/local/nvidia/bin/gpu-client", argc > 3 ? argv[3] : folder);
    return fail("unknown command", what);
}
