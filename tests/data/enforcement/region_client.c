/* The library's side of a HAMi-core region, layout v1.2, without a GPU: maps the file as libvgpu.so does, takes a slot, charges memory
 * against the limit that it finds; or does to the file what a hostile container can do.
 *
 *   cc -static -o region_client region_client.c
 *   region_client [-f FILE] COMMAND [ARGUMENT...] [COMMAND...]
 *
 * Without -f the file is $CUDA_DEVICE_MEMORY_SHARED_CACHE, or /tmp/cudevshr.cache. Commands run in their order, each prints one line.
 *
 *   create BYTES PERCENT   make the file as the library does without an agent (only as the first command)
 *   show                   magic, version, limits, switch, priority, processes
 *   take                   take a slot, under the region's semaphore; then wait for the semaphore of those that look for their host pid
 *   search                 take that semaphore, as if looking
 *   host PID               say which process of the host this is
 *   use BYTES              charge so much in all, whatever the limit is
 *   alloc BYTES            charge so much more if the limit allows: "granted" or "refused"
 *   leave                  give the slot back
 *   wait                   until standard input ends
 *   sleep SECONDS
 * What only a hostile one does:
 *   raise BYTES PERCENT    change its own limits
 *   priority N, switch N, count N, version MAJOR MINOR, magic N
 *   lock                   begin to write the slot, and never end
 *   grow BYTES             write behind the file's end
 *   truncate BYTES         cut the file; the next command that touches the map dies of SIGBUS
 *   symlink TARGET, fifo   put something else at the file's path; says the error if that can't be done (a mount point)
 * Ends with 0, or with 1 and a line on standard error.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 19920718
#define DEVICES 16
#define SLOTS 1024

struct use {
  uint64_t context, module, data, offset;
  _Atomic uint64_t total;
  uint64_t spare[3];
};
struct util {
  uint64_t dec, enc, sm, spare[3];
};
struct slot {
  int32_t pid, hostpid;
  struct use used[DEVICES];
  uint64_t monitor_used[DEVICES];
  struct util device_util[DEVICES];
  int32_t status;
  _Atomic uint64_t seqlock;
  uint64_t spare[2];
};
struct region {
  _Atomic int32_t magic;
  uint32_t major, minor;
  int32_t sm_init_flag;
  uint64_t owner_pid;
  sem_t sem;
  uint64_t device_num;
  char uuids[DEVICES][96];
  _Atomic uint64_t limit[DEVICES];
  uint64_t sm_limit[DEVICES];
  struct slot procs[SLOTS];
  int32_t proc_num, utilization_switch, recent_kernel, priority;
  uint64_t last_kernel_time;
  sem_t sem_postinit;
};
_Static_assert(sizeof(struct region) == 2008952, "a region of layout v1.2");
_Static_assert(offsetof(struct region, procs) == 1856, "a header of layout v1.2");
_Static_assert(sizeof(struct slot) == 1960, "a slot of layout v1.2");

static const char *path;
static struct region *region;
static struct slot *mine;

static void fail(const char *what) {
  fprintf(stderr, "region_client: %s: %s: %s\n", what, path, strerror(errno));
  exit(1);
}

static void need(int fine, const char *what) {
  if (!fine) {
    fprintf(stderr, "region_client: %s\n", what);
    exit(1);
  }
}

static void map_region(int flags) {
  if (region) return;
  int file = open(path, O_RDWR | flags, 0666);
  if (file < 0) fail("open");
  if (flags & O_CREAT) {
    char zero = 0;
    if (lseek(file, sizeof(struct region), SEEK_SET) < 0 || write(file, &zero, 1) != 1) fail("extend");
  }
  region = mmap(NULL, sizeof(struct region), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (region == MAP_FAILED) fail("mmap");
  close(file);
}

static void create_region(uint64_t bytes, uint64_t percent) {
  map_region(O_CREAT);
  region->major = 1;
  region->minor = 2;
  region->limit[0] = bytes;
  for (int i = 0; i < DEVICES; i++) region->sm_limit[i] = i ? 100 : percent;
  if (sem_init(&region->sem, 1, 1) || sem_init(&region->sem_postinit, 1, 1)) fail("sem_init");
  region->utilization_switch = 1;
  region->recent_kernel = 2;
  region->priority = 1;
  region->magic = MAGIC;
}

static void show(void) {
  printf("magic=%d version=%u.%u memory=%llu cores=%llu switch=%d recent=%d priority=%d processes=%d\n", region->magic, region->major,
         region->minor, (unsigned long long)region->limit[0], (unsigned long long)region->sm_limit[0], region->utilization_switch,
         region->recent_kernel, region->priority, region->proc_num);
}

static void lock_region(sem_t *sem, int seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += seconds;
  if (sem_timedwait(sem, &until)) fail("sem_timedwait");
}

static void take_slot(void) {
  lock_region(&region->sem, 5);
  region->owner_pid = getpid();
  int n = 0;
  while (n < region->proc_num && region->procs[n].pid) n++;
  need(n < SLOTS, "no slot is free");
  mine = &region->procs[n];
  memset(mine, 0, sizeof *mine);
  mine->pid = getpid();
  mine->status = 1;
  if (n >= region->proc_num) region->proc_num = n + 1;
  region->last_kernel_time = time(NULL);
  region->owner_pid = 0;
  sem_post(&region->sem);
  lock_region(&region->sem_postinit, 30);
  sem_post(&region->sem_postinit);
  printf("slot %d process %d\n", n, getpid());
}

static void charge(uint64_t bytes) {
  need(mine != NULL, "take a slot first");
  mine->seqlock++;
  mine->used[0].total = bytes;
  mine->seqlock++;
}

static void alloc(uint64_t bytes) {
  need(mine != NULL, "take a slot first");
  uint64_t total = bytes;
  for (int n = 0; n < region->proc_num; n++) total += region->procs[n].used[0].total;
  if (region->limit[0] && total > region->limit[0]) {
    puts("refused");
    return;
  }
  charge(mine->used[0].total + bytes);
  puts("granted");
}

static void replace(const char *target) {
  if (unlink(path)) {
    printf("can't: %s\n", strerror(errno));
    return;
  }
  if (target ? symlink(target, path) : mkfifo(path, 0666)) fail("replace");
  puts("replaced");
}

static char **next;
static const char *word(void) {
  need(*next != NULL, "an argument is missing");
  return *next++;
}
static uint64_t number(void) { return strtoull(word(), NULL, 0); }

static int library_side(const char *command) {
  if (!strcmp(command, "show")) return show(), 1;
  if (!strcmp(command, "take")) return take_slot(), 1;
  if (!strcmp(command, "alloc")) return alloc(number()), 1;
  if (!strcmp(command, "create")) {
    uint64_t bytes = number();
    create_region(bytes, number());
  } else if (!strcmp(command, "host")) {
    need(mine != NULL, "take a slot first");
    mine->hostpid = (int32_t)number();
  } else if (!strcmp(command, "search")) {
    lock_region(&region->sem_postinit, 30);
  } else if (!strcmp(command, "use")) {
    charge(number());
  } else if (!strcmp(command, "leave")) {
    need(mine != NULL, "take a slot first");
    mine->pid = mine->status = 0;
  } else {
    return 0;
  }
  return puts(command), 1;
}

static int hostile_side(const char *command) {
  if (!strcmp(command, "symlink")) return replace(word()), 1;
  if (!strcmp(command, "fifo")) return replace(NULL), 1;
  if (!strcmp(command, "raise")) {
    region->limit[0] = number();
    region->sm_limit[0] = number();
  } else if (!strcmp(command, "priority")) {
    region->priority = (int32_t)number();
  } else if (!strcmp(command, "switch")) {
    region->utilization_switch = (int32_t)number();
  } else if (!strcmp(command, "count")) {
    region->proc_num = (int32_t)number();
  } else if (!strcmp(command, "version")) {
    region->major = (uint32_t)number();
    region->minor = (uint32_t)number();
  } else if (!strcmp(command, "magic")) {
    region->magic = (int32_t)number();
  } else if (!strcmp(command, "lock")) {
    need(mine != NULL, "take a slot first");
    mine->seqlock |= 1;
  } else if (!strcmp(command, "grow")) {
    char *more = calloc(1, number());
    int file = open(path, O_WRONLY | O_APPEND);
    if (file < 0 || !more || write(file, more, strtoull(next[-1], NULL, 0)) < 0) fail("grow");
    close(file);
    free(more);
  } else if (!strcmp(command, "truncate")) {
    if (truncate(path, (off_t)number())) fail("truncate");
  } else {
    return 0;
  }
  return puts(command), 1;
}

int main(int count, char **arguments) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  path = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
  if (!path || !*path) path = "/tmp/cudevshr.cache";
  next = arguments + 1;
  if (count > 2 && !strcmp(*next, "-f")) path = next[1], next += 2;
  if (*next && strcmp(*next, "create")) map_region(0);
  while (*next) {
    const char *command = *next++;
    if (!strcmp(command, "wait")) {
      puts("waiting");
      while (getchar() != EOF) continue;
    } else if (!strcmp(command, "sleep")) {
      puts("sleeping");
      sleep((unsigned)number());
    } else {
      need(library_side(command) || hostile_side(command), "no such command");
    }
  }
  return 0;
}
