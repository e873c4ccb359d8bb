"""Layout 1.2 of HAMi-core's region, a file with limits and use, for libraries since HAMi v2.8.2.

It is for 64-bit little-endian glibc, 16 devices and 1024 slots, one for each process. Offsets are in bytes; in a slot they count from its
beginning.
"""

import struct
from typing import Final

MAGIC: Final = 19920718
VERSION: Final = (1, 2)
DEVICES: Final = 16
SLOTS: Final = 1024
SIZEOF: Final = 2_008_952
#: The library makes the file one byte longer than the structure that it maps.
FILE_BYTES: Final = SIZEOF + 1

#: Magic (i32), major and minor version (u32).
HEAD: Final = struct.Struct("<iII")
SEM: Final = 24
#: A process in cuInit holds this semaphore while looking for its pid on the host. glibc's sem_t: value and number of waiters (u32 each).
SEM_POSTINIT: Final = 2_008_920
#: For each device: bytes of memory, percent of cores (u64).
LIMIT: Final = 1600
SM_LIMIT: Final = 1728
LIMITS: Final = struct.Struct(f"<{DEVICES}Q")

PROCS: Final = 1856
SLOT_BYTES: Final = 1960
#: The pid in the container, and on the host (i32; 0: unknown).
SLOT_PID: Final = 0
SLOT_HOSTPID: Final = 4
SLOT_STATUS: Final = 1928
SLOT_SEQLOCK: Final = 1936

#: Words (i32) behind the slots.
PROC_NUM: Final = 2_008_896
UTILIZATION_SWITCH: Final = 2_008_900
RECENT_KERNEL: Final = 2_008_904
PRIORITY: Final = 2_008_908


def slot_at(index: int) -> int:
    return PROCS + index * SLOT_BYTES
