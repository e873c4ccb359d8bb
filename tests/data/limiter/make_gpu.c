/* Makes the shared file of the fake GPUs: make_gpu FILE GPUS BYTES-OF-EACH [UUID...]. Without one, a GPU's UUID ends with its index.
 * FAKE_CHECKPOINT_SPEED: how many times faster than an H200 checkpoints and restores are. */
#include "gpu.h"

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0666);
    if (fd < 0 || ftruncate(fd, sizeof(struct model))) return 1;
    struct model *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m->lock, &a);
    m->gpus = atoi(argv[2]);
    const char *speed = getenv("FAKE_CHECKPOINT_SPEED");
    m->checkpoint_speed = speed ? atoi(speed) : 1;
    for (int i = 0; i < m->gpus && i < GPUS; i++) {
        m->gpu[i].total_bytes = strtoull(argv[3], NULL, 10), m->gpu[i].reserved_bytes = 615 * MIB;
        if (i + 4 < argc) snprintf(m->gpu[i].uuid, sizeof m->gpu[i].uuid, "%s", argv[i + 4]);
        else snprintf(m->gpu[i].uuid, sizeof m->gpu[i].uuid, "GPU-00000000-0000-0000-0000-%012d", i + 1);
    }
    return 0;
}
