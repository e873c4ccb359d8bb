"""Every released layout of HAMi-core's shared region, as data.

All are for 64-bit little-endian glibc: 16 devices, 1024 slots, one slot for each process. The library makes the file one byte longer
than the structure that it maps. Offsets are in bytes; those of a slot count from the slot's beginning.
"""

import struct
from dataclasses import dataclass
from typing import Final

from gpumgr.errors import GpumgrError

MAGIC: Final = 19920718
DEVICES: Final = 16
SLOTS: Final = 1024
UUID_BYTES: Final = 96
SEMAPHORE_BYTES: Final = 32
#: The words that identify a region: magic (i32), major and minor version (u32).
HEAD: Final = struct.Struct("<iII")

#: In every layout a slot begins with the process's pid in its container and on the host (i32; host 0: unknown).
SLOT_PID: Final = 0
SLOT_HOSTPID: Final = 4
#: Of each device's counters in a slot: context, module, data, offset, total (u64); the last is what counts against the limit.
USED_TOTAL: Final = 32


class UnknownLayout(GpumgrError):
    """The file is not a region of a released HAMi-core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """One process's slot. `used` and `device_util` hold one group for each device, a stride apart."""

    size_bytes: int
    used: int
    used_stride: int
    monitor_used: int
    status: int
    seqlock: int | None = None
    device_util: int | None = None
    device_util_stride: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One release's region. `version` None: it carries no version words."""

    name: str
    version: tuple[int, int] | None
    sizeof: int
    sm_init_flag: int
    owner_pid: int
    sem: int
    device_num: int
    uuids: int
    limit: int
    sm_limit: int
    procs: int
    slot: SlotLayout
    proc_num: int
    utilization_switch: int
    recent_kernel: int
    priority: int
    last_kernel_time: int | None = None
    sem_postinit: int | None = None

    @property
    def file_bytes(self) -> int:
        return self.sizeof + 1

    def slot_at(self, index: int) -> int:
        return self.procs + index * self.slot.size_bytes


_V0A_SLOT: Final = SlotLayout(size_bytes=784, used=8, used_stride=40, monitor_used=648, status=776)
_V0B_SLOT: Final = SlotLayout(
    size_bytes=1168, used=8, used_stride=40, monitor_used=648, device_util=776, device_util_stride=24, status=1160
)
_V1_1_SLOT: Final = SlotLayout(
    size_bytes=1960, used=8, used_stride=64, monitor_used=1032, device_util=1160, device_util_stride=48, status=1928
)
_V1_1_DIRTY_SLOT: Final = SlotLayout(
    size_bytes=1960, seqlock=8, used=16, used_stride=64, monitor_used=1040, device_util=1168, device_util_stride=48, status=1936
)
_V1_2_SLOT: Final = SlotLayout(
    size_bytes=1960, used=8, used_stride=64, monitor_used=1032, device_util=1160, device_util_stride=48, status=1928, seqlock=1936
)

#: Before any release, 2024-01.
V0A: Final = Layout(
    name="v0a",
    version=None,
    sizeof=804_680,
    sm_init_flag=4,
    owner_pid=8,
    sem=16,
    device_num=48,
    uuids=56,
    limit=1592,
    sm_limit=1720,
    procs=1848,
    slot=_V0A_SLOT,
    proc_num=804_664,
    utilization_switch=804_668,
    recent_kernel=804_672,
    priority=804_676,
)
#: With HAMi up to v2.4.0.
V0B: Final = Layout(
    name="v0b",
    version=None,
    sizeof=1_197_896,
    sm_init_flag=4,
    owner_pid=8,
    sem=16,
    device_num=48,
    uuids=56,
    limit=1592,
    sm_limit=1720,
    procs=1848,
    slot=_V0B_SLOT,
    proc_num=1_197_880,
    utilization_switch=1_197_884,
    recent_kernel=1_197_888,
    priority=1_197_892,
)
#: With HAMi v2.4.1 to v2.8.0.
V1_1: Final = Layout(
    name="v1.1",
    version=(1, 1),
    sizeof=2_008_952,
    sm_init_flag=12,
    owner_pid=16,
    sem=24,
    device_num=56,
    uuids=64,
    limit=1600,
    sm_limit=1728,
    procs=1856,
    slot=_V1_1_SLOT,
    proc_num=2_008_896,
    utilization_switch=2_008_900,
    recent_kernel=2_008_904,
    priority=2_008_908,
    last_kernel_time=2_008_912,
)
#: With HAMi v2.8.1 alone: a second semaphore moves what follows by 32 bytes, under the same version words.
V1_1_DIRTY: Final = Layout(
    name="v1.1-dirty",
    version=(1, 1),
    sizeof=2_008_984,
    sm_init_flag=12,
    owner_pid=16,
    sem=24,
    sem_postinit=56,
    device_num=88,
    uuids=96,
    limit=1632,
    sm_limit=1760,
    procs=1888,
    slot=_V1_1_DIRTY_SLOT,
    proc_num=2_008_928,
    utilization_switch=2_008_932,
    recent_kernel=2_008_936,
    priority=2_008_940,
    last_kernel_time=2_008_944,
)
#: Since HAMi v2.8.2; the one that gpumgr makes.
V1_2: Final = Layout(
    name="v1.2",
    version=(1, 2),
    sizeof=2_008_952,
    sm_init_flag=12,
    owner_pid=16,
    sem=24,
    device_num=56,
    uuids=64,
    limit=1600,
    sm_limit=1728,
    procs=1856,
    slot=_V1_2_SLOT,
    proc_num=2_008_896,
    utilization_switch=2_008_900,
    recent_kernel=2_008_904,
    priority=2_008_908,
    last_kernel_time=2_008_912,
    sem_postinit=2_008_920,
)
LAYOUTS: Final = (V0A, V0B, V1_1, V1_1_DIRTY, V1_2)
_SIZES: Final = frozenset(layout.file_bytes for layout in LAYOUTS)


def identify(file_bytes: int, head: bytes) -> Layout:
    """The layout of a file with this size and these first bytes (12 at least). Raises UnknownLayout.

    The size comes first: one release changed the layout and kept the version words.
    """
    if file_bytes not in _SIZES:
        raise UnknownLayout(f"{file_bytes} bytes are no region of a released HAMi-core")
    if len(head) < HEAD.size:
        raise UnknownLayout(f"it ends after {len(head)} bytes")
    magic, *version = HEAD.unpack_from(head)
    if magic != MAGIC:
        raise UnknownLayout(f"it begins with {magic} instead of HAMi-core's {MAGIC}")
    for layout in LAYOUTS:
        if layout.file_bytes == file_bytes and layout.version in (None, tuple(version)):
            return layout
    raise UnknownLayout(f"version {version[0]}.{version[1]} with {file_bytes} bytes is no released HAMi-core's")
