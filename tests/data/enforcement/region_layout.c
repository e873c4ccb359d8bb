/* Layout 1.2 of HAMi-core's region as C sees it: prints "name number", with the names of gpumgr's table.
 * The structures are written from the released header: names of ours, order and types of theirs. */
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct { uint64_t context, module, data, offset, total, spare[3]; } use;
typedef struct { uint64_t dec, enc, sm, spare[3]; } util;
typedef struct {
  int32_t pid, hostpid;
  use used[16];
  uint64_t monitor_used[16];
  util device_util[16];
  int32_t status;
  uint64_t seqlock;
  uint64_t spare[2];
} slot;
typedef struct {
  int32_t magic;
  uint32_t major, minor;
  int32_t sm_init_flag;
  uint64_t owner_pid;
  sem_t sem;
  uint64_t device_num;
  char uuids[16][96];
  uint64_t limit[16];
  uint64_t sm_limit[16];
  slot procs[1024];
  int32_t proc_num, utilization_switch, recent_kernel, priority;
  uint64_t last_kernel_time;
  sem_t sem_postinit;
} region;

#define OFFSET(name, type, field) printf("%s %zu\n", name, offsetof(type, field));

int main(void) {
  printf("SIZEOF %zu\n", sizeof(region));
  OFFSET("SEM", region, sem)
  OFFSET("SEM_POSTINIT", region, sem_postinit)
  OFFSET("LIMIT", region, limit)
  OFFSET("SM_LIMIT", region, sm_limit)
  OFFSET("PROCS", region, procs)
  printf("SLOT_BYTES %zu\n", sizeof(slot));
  OFFSET("SLOT_PID", slot, pid)
  OFFSET("SLOT_HOSTPID", slot, hostpid)
  OFFSET("SLOT_STATUS", slot, status)
  OFFSET("SLOT_SEQLOCK", slot, seqlock)
  OFFSET("PROC_NUM", region, proc_num)
  OFFSET("UTILIZATION_SWITCH", region, utilization_switch)
  OFFSET("RECENT_KERNEL", region, recent_kernel)
  OFFSET("PRIORITY", region, priority)
  return 0;
}
