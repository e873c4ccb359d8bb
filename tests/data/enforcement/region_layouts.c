/* The layouts of HAMi-core's region as C sees them: prints "layout field offset" for each field, and "layout sizeof bytes".
 * The structures are written from the table of released layouts: names of ours, order and types of theirs. */
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct { uint64_t context, module, data, offset, total; } use_short;
typedef struct { uint64_t context, module, data, offset, total, spare[3]; } use_long;
typedef struct { uint64_t dec, enc, sm; } util_short;
typedef struct { uint64_t dec, enc, sm, spare[3]; } util_long;

typedef struct { int32_t pid, hostpid; use_short used[16]; uint64_t monitor_used[16]; int32_t status; } slot_v0a;
typedef struct { int32_t pid, hostpid; use_short used[16]; uint64_t monitor_used[16]; util_short device_util[16]; int32_t status; } slot_v0b;
typedef struct {
  int32_t pid, hostpid;
  use_long used[16];
  uint64_t monitor_used[16];
  util_long device_util[16];
  int32_t status;
  uint64_t spare[3];
} slot_v1_1;
typedef struct {
  int32_t pid, hostpid;
  uint64_t seqlock;
  use_long used[16];
  uint64_t monitor_used[16];
  util_long device_util[16];
  int32_t status;
  uint64_t spare[2];
} slot_v1_1_dirty;
typedef struct {
  int32_t pid, hostpid;
  use_long used[16];
  uint64_t monitor_used[16];
  util_long device_util[16];
  int32_t status;
  uint64_t seqlock;
  uint64_t spare[2];
} slot_v1_2;

#define DEVICES_AND_SLOTS(slot) \
  uint64_t device_num;          \
  char uuids[16][96];           \
  uint64_t limit[16];           \
  uint64_t sm_limit[16];        \
  slot procs[1024];             \
  int32_t proc_num, utilization_switch, recent_kernel, priority;

typedef struct { int32_t magic, sm_init_flag; uint64_t owner_pid; sem_t sem; DEVICES_AND_SLOTS(slot_v0a) } region_v0a;
typedef struct { int32_t magic, sm_init_flag; uint64_t owner_pid; sem_t sem; DEVICES_AND_SLOTS(slot_v0b) } region_v0b;
typedef struct {
  int32_t magic;
  uint32_t major, minor;
  int32_t sm_init_flag;
  uint64_t owner_pid;
  sem_t sem;
  DEVICES_AND_SLOTS(slot_v1_1)
  uint64_t last_kernel_time, spare[4];
} region_v1_1;
typedef struct {
  int32_t magic;
  uint32_t major, minor;
  int32_t sm_init_flag;
  uint64_t owner_pid;
  sem_t sem, sem_postinit;
  DEVICES_AND_SLOTS(slot_v1_1_dirty)
  uint64_t last_kernel_time, spare[4];
} region_v1_1_dirty;
typedef struct {
  int32_t magic;
  uint32_t major, minor;
  int32_t sm_init_flag;
  uint64_t owner_pid;
  sem_t sem;
  DEVICES_AND_SLOTS(slot_v1_2)
  uint64_t last_kernel_time;
  sem_t sem_postinit;
} region_v1_2;

#define FIELD(name, type, prefix, field) printf("%s %s%s %zu\n", name, prefix, #field, offsetof(type, field));
#define REGION(name, type)                     \
  printf("%s sizeof %zu\n", name, sizeof(type)); \
  FIELD(name, type, "", sm_init_flag)          \
  FIELD(name, type, "", owner_pid)             \
  FIELD(name, type, "", sem)                   \
  FIELD(name, type, "", device_num)            \
  FIELD(name, type, "", uuids)                 \
  FIELD(name, type, "", limit)                 \
  FIELD(name, type, "", sm_limit)              \
  FIELD(name, type, "", procs)                 \
  FIELD(name, type, "", proc_num)              \
  FIELD(name, type, "", utilization_switch)    \
  FIELD(name, type, "", recent_kernel)         \
  FIELD(name, type, "", priority)
#define SLOT(name, type, use)                              \
  printf("%s slot.size_bytes %zu\n", name, sizeof(type));  \
  printf("%s slot.used_stride %zu\n", name, sizeof(use));  \
  FIELD(name, type, "slot.", pid)                          \
  FIELD(name, type, "slot.", hostpid)                      \
  FIELD(name, type, "slot.", used)                         \
  FIELD(name, use, "slot.used.", total)                    \
  FIELD(name, type, "slot.", monitor_used)                 \
  FIELD(name, type, "slot.", status)
#define UTIL(name, type, util)                                    \
  printf("%s slot.device_util_stride %zu\n", name, sizeof(util)); \
  FIELD(name, type, "slot.", device_util)

int main(void) {
  REGION("v0a", region_v0a)
  SLOT("v0a", slot_v0a, use_short)
  REGION("v0b", region_v0b)
  SLOT("v0b", slot_v0b, use_short)
  UTIL("v0b", slot_v0b, util_short)
  REGION("v1.1", region_v1_1)
  FIELD("v1.1", region_v1_1, "", last_kernel_time)
  SLOT("v1.1", slot_v1_1, use_long)
  UTIL("v1.1", slot_v1_1, util_long)
  REGION("v1.1-dirty", region_v1_1_dirty)
  FIELD("v1.1-dirty", region_v1_1_dirty, "", last_kernel_time)
  FIELD("v1.1-dirty", region_v1_1_dirty, "", sem_postinit)
  SLOT("v1.1-dirty", slot_v1_1_dirty, use_long)
  UTIL("v1.1-dirty", slot_v1_1_dirty, util_long)
  FIELD("v1.1-dirty", slot_v1_1_dirty, "slot.", seqlock)
  REGION("v1.2", region_v1_2)
  FIELD("v1.2", region_v1_2, "", last_kernel_time)
  FIELD("v1.2", region_v1_2, "", sem_postinit)
  SLOT("v1.2", slot_v1_2, use_long)
  UTIL("v1.2", slot_v1_2, util_long)
  FIELD("v1.2", slot_v1_2, "slot.", seqlock)
  return 0;
}
