"""A new region for one container, as the library would make it, but with the granted limits. Pure.

The library prefers the region to its environment.
"""

import struct
from dataclasses import dataclass
from typing import Final

from gpumgr.enforcement.hami_core import layouts

LAYOUT: Final = layouts.V1_2
MEBIBYTE: Final = 1 << 20
#: The library's priority without CUDA_TASK_PRIORITY; 0 is the only higher one.
PRIORITY: Final = 1
#: Apply the region's core limits.
SWITCH_ON: Final = 1
#: The library's value for a recent launch; below 0 it would delay launches.
RECENT_KERNEL: Final = 2
#: The percentage for "no limit", as for a device that the environment does not name.
_NO_CORE_LIMIT: Final = 100
_NO_MEMORY_LIMIT: Final = 0
#: glibc's sem_t on 64-bit machines: value in the low word of a u64, no waiters; 128 = shared between processes.
_FREE_SEMAPHORE: Final = struct.pack("<QI20x", 1, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLimits:
    """The limits in a region: for each of 16 devices bytes (0 = unlimited) and percent (100 = unlimited); the container has device 0."""

    memory_bytes: tuple[int, ...]
    core_percent: tuple[int, ...]
    priority: int = PRIORITY


def limits(*, memory_bytes: int, cores: int) -> RegionLimits:
    """The limits of a share. Raises ValueError for what the library would read as "unlimited", or can't be expressed in its environment."""
    if not 1 <= cores <= 99:
        raise ValueError(f"{cores} cores are not a share of a GPU: 1 to 99 are valid")
    if memory_bytes < MEBIBYTE or memory_bytes % MEBIBYTE or memory_bytes >= 1 << 63:
        raise ValueError(f"{memory_bytes} bytes are not a memory limit: whole MiB from 1 are valid")
    others = layouts.DEVICES - 1
    return RegionLimits(
        memory_bytes=(memory_bytes, *[_NO_MEMORY_LIMIT] * others), core_percent=(cores, *[_NO_CORE_LIMIT] * others)
    )


def seed(wanted: RegionLimits) -> bytes:
    """All bytes of the file. It has no devices and processes: the library adds them."""
    content = bytearray(LAYOUT.file_bytes)
    assert LAYOUT.version is not None
    assert LAYOUT.sem_postinit is not None
    layouts.HEAD.pack_into(content, 0, layouts.MAGIC, *LAYOUT.version)
    for semaphore in (LAYOUT.sem, LAYOUT.sem_postinit):
        content[semaphore : semaphore + layouts.SEMAPHORE_BYTES] = _FREE_SEMAPHORE
    struct.pack_into(f"<{layouts.DEVICES}Q", content, LAYOUT.limit, *wanted.memory_bytes)
    struct.pack_into(f"<{layouts.DEVICES}Q", content, LAYOUT.sm_limit, *wanted.core_percent)
    for offset, value in (
        (LAYOUT.utilization_switch, SWITCH_ON),
        (LAYOUT.recent_kernel, RECENT_KERNEL),
        (LAYOUT.priority, wanted.priority),
    ):
        struct.pack_into("<i", content, offset, value)
    return bytes(content)
