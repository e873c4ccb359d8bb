"""A region: the file with limits and use that HAMi-core's library ("the library") and the agent share.

The container may have written any bytes, so `decode` bounds every value or leaves it out. The agent never takes the region's locks: a
process in the container's pid namespace would take the agent for a dead holder.
"""

import ctypes
import mmap
import platform
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from gpumgr.common.units import CORES_PER_GPU
from gpumgr.enforcement.container_files import SharedFile
from gpumgr.enforcement.hami_core import layout
from gpumgr.ledger.gpu_share import SharedGpu

MEBIBYTE: Final = 1 << 20
#: The library's default priority; 0 is the only higher one.
PRIORITY: Final = 1
#: With this value of `utilization_switch` the library applies the region's core limits.
SWITCH_ON: Final = 1
#: The library writes this into `recent_kernel` at a launch. It delays launches while the word is below 0.
RECENT_KERNEL: Final = 2
_NO_CORE_LIMIT: Final = 100
_NO_MEMORY_LIMIT: Final = 0
#: glibc's sem_t on 64-bit machines: value (u32), waiters (u32), and 128 = shared between processes.
_FREE_SEMAPHORE: Final = struct.pack("<QI20x", 1, 128)


class RegionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes (0 = unlimited) and percent (100 = unlimited) for each of 16 devices, the container's GPUs first."""

    memory_bytes: tuple[int, ...]
    core_percent: tuple[int, ...]


def limits(gpus: Sequence[SharedGpu]) -> RegionLimits:
    """The limits of a share; its whole GPUs have none.

    Raises ValueError for more than 16 GPUs, for several GPUs in an unknown order, and for a limit that the library would read as
    "unlimited" or that its environment can't express.
    """
    if len(gpus) > layout.DEVICES:
        raise ValueError(f"it shares {len(gpus)} GPUs: at most {layout.DEVICES} are valid")
    if len(gpus) > 1 and (unknown := [gpu.name for gpu in gpus if gpu.bus_id is None]):
        raise ValueError(
            f"the driver does not show the PCI bus id of GPU {unknown[0]}, and the order of several GPUs depends on it"
        )
    for gpu in gpus:
        if len(gpus) == 1 or not gpu.whole:
            _check(gpu)
    others = layout.DEVICES - len(gpus)
    return RegionLimits(
        memory_bytes=(*(_NO_MEMORY_LIMIT if gpu.whole else gpu.limit_bytes for gpu in gpus), *[_NO_MEMORY_LIMIT] * others),
        core_percent=(*(gpu.core_percent for gpu in gpus), *[_NO_CORE_LIMIT] * others),
    )


def _check(gpu: SharedGpu) -> None:
    if not 0 <= gpu.cores < CORES_PER_GPU:
        raise ValueError(f"{gpu.cores} cores are not a share of a GPU: 1 to 99 are valid, and 0 for no limit")
    if gpu.memory_bytes < MEBIBYTE or gpu.memory_bytes % MEBIBYTE or gpu.memory_bytes >= 1 << 63:
        raise ValueError(f"{gpu.memory_bytes} bytes are not a memory limit: whole MiB from 1 are valid")


def seed(wanted: RegionLimits) -> bytes:
    """The bytes of a new file. The library prefers the file's limits to the environment's, and adds devices and processes."""
    content = bytearray(layout.FILE_BYTES)
    layout.HEAD.pack_into(content, 0, layout.MAGIC, *layout.VERSION)
    for semaphore in (layout.SEM, layout.SEM_POSTINIT):
        content[semaphore : semaphore + len(_FREE_SEMAPHORE)] = _FREE_SEMAPHORE
    layout.LIMITS.pack_into(content, layout.LIMIT, *wanted.memory_bytes)
    layout.LIMITS.pack_into(content, layout.SM_LIMIT, *wanted.core_percent)
    struct.pack_into("<iii", content, layout.UTILIZATION_SWITCH, SWITCH_ON, RECENT_KERNEL, PRIORITY)
    return bytes(content)


class ProcessSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its pid in the container and on the host (0: unknown). `seqlock` is odd while the slot is written."""

    index: int
    pid: int
    hostpid: int
    status: int
    seqlock: int

    @property
    def live(self) -> bool:
        return self.pid > 0 and self.status != 0

    @property
    def stuck(self) -> bool:
        """Readers in the container wait until the seqlock is even."""
        return self.seqlock % 2 == 1


class RegionView(msgspec.Struct, frozen=True, kw_only=True):
    """A region at one time. `slots`: the live and the stuck ones. `postinit`: a semaphore, 0 while a process looks for its host pid.
    `postinit_waiters`: the processes that wait for it, and perhaps killed ones. `recent_kernel`: above 0 after a launch; launches wait
    while it is below 0. `problem`: a value that only the container can have written."""

    limits_bytes: tuple[int, ...]
    core_limits_percent: tuple[int, ...]
    slots: tuple[ProcessSlot, ...]
    utilization_switch: int
    recent_kernel: int
    priority: int
    postinit: int
    postinit_waiters: int
    problem: str | None = None


def decode(read: Callable[[int, int], bytes]) -> RegionView:
    """`read(offset, count)` returns `count` bytes of the region. Raises what `read` raises."""
    header, tail = read(0, layout.PROCS), read(layout.PROC_NUM, layout.SIZEOF - layout.PROC_NUM)
    count = int.from_bytes(tail[:4], "little", signed=True)
    bounded = min(max(count, 0), layout.SLOTS)
    slots = read(layout.PROCS, bounded * layout.SLOT_BYTES)
    decoded = [_slot(index, slots) for index in range(bounded)]
    switch, recent_kernel, priority = struct.unpack_from("<iii", tail, layout.UTILIZATION_SWITCH - layout.PROC_NUM)
    postinit, waiters = struct.unpack_from("<II", tail, layout.SEM_POSTINIT - layout.PROC_NUM)
    return RegionView(
        limits_bytes=layout.LIMITS.unpack_from(header, layout.LIMIT),
        core_limits_percent=layout.LIMITS.unpack_from(header, layout.SM_LIMIT),
        slots=tuple(slot for slot in decoded if slot.live or slot.stuck),
        utilization_switch=switch,
        recent_kernel=recent_kernel,
        priority=priority,
        postinit=postinit,
        postinit_waiters=waiters,
        problem=_problem(header, count),
    )


def _problem(header: bytes, count: int) -> str | None:
    magic, *version = layout.HEAD.unpack_from(header)
    if magic != layout.MAGIC:
        return f"it begins with {magic} instead of {layout.MAGIC}"
    if tuple(version) != layout.VERSION:
        return f"it has version {version[0]}.{version[1]} instead of v1.2"
    return None if 0 <= count <= layout.SLOTS else f"it counts {count} processes of at most {layout.SLOTS}"


def _slot(index: int, slots: bytes) -> ProcessSlot:
    start = index * layout.SLOT_BYTES
    pid, hostpid = struct.unpack_from("<ii", slots, start + layout.SLOT_PID)
    status, seqlock = struct.unpack_from("<i4xQ", slots, start + layout.SLOT_STATUS)
    return ProcessSlot(index=index, pid=pid, hostpid=hostpid, status=status, seqlock=seqlock)


FILE_NAME: Final = "region.cache"
#: futex(2).
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE: Final = 1


class RegionFile(SharedFile):
    """The file is writable for all users, since the library ends every CUDA process that can't write it."""

    @classmethod
    def create_in(cls, folder: Path, data: bytes) -> Self:
        """Replaces the file. `folder` must exist. `data`: from `seed`, with zeros in its slots."""
        parts = {0: data[: layout.PROCS], layout.PROC_NUM: data[layout.PROC_NUM :]}
        return cls.create(folder / FILE_NAME, layout.FILE_BYTES, parts)

    @classmethod
    def open_in(cls, folder: Path) -> Self:
        return cls.open(folder / FILE_NAME, layout.FILE_BYTES)

    def read(self) -> RegionView:
        self.check()
        return decode(self.read_at)

    def wake(self, semaphore: int) -> None:
        """Wakes one process that waits for this semaphore. Write the semaphore's new value first."""
        # The file is mapped only because futex needs an address; the mapping is not read.
        page = semaphore // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError), mmap.mmap(self.descriptor, layout.SIZEOF - page, offset=page) as mapped:
            word = ctypes.c_uint32.from_buffer(mapped, semaphore - page)
            ctypes.CDLL(None).syscall(_FUTEX[platform.machine()], ctypes.byref(word), _FUTEX_WAKE, 1)
            del word  # otherwise the mapping can't be closed
