"""A fresh region for one container, as its library would make it for itself, but with the limits that were granted.

The library believes what is in the region before it believes its environment. Pure.
"""

import struct
from dataclasses import dataclass
from typing import Final

from gpumgr.enforcement.hami_core import layouts

LAYOUT: Final = layouts.V1_2
MEBIBYTE: Final = 1 << 20
#: What the library takes as its priority without CUDA_TASK_PRIORITY; 0 is the only higher one.
PRIORITY: Final = 1
#: Follow the region's limits of cores.
SWITCH_ON: Final = 1
#: The library's sign of a launch not long ago; below 0 it would hold its launches back.
RECENT_KERNEL: Final = 2
#: A percentage that the library takes for "no limit", as for a device that the environment does not name.
_NO_CORE_LIMIT: Final = 100
_NO_MEMORY_LIMIT: Final = 0
#: glibc's sem_t on 64-bit machines: value in the low word of a u64, no waiters; 128 = shared between processes.
_FREE_SEMAPHORE: Final = struct.pack("<QI20x", 1, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a region says: for each of 16 devices bytes (0 = unlimited) and percent (100 = unlimited); the container has device 0."""

    memory_bytes: tuple[int, ...]
    core_percent: tuple[int, ...]
    priority: int = PRIORITY


def limits(*, memory_bytes: int, cores: int) -> Limits:
    """The limits of a share. Raises ValueError for what the library would read as "unlimited", or can't be told in its environment."""
    if not 1 <= cores <= 99:
        raise ValueError(f"{cores} cores are no share of a GPU: 1 to 99 are")
    if memory_bytes < MEBIBYTE or memory_bytes % MEBIBYTE or memory_bytes >= 1 << 63:
        raise ValueError(f"{memory_bytes} bytes are no memory limit: whole MiB are, from 1")
    others = layouts.DEVICES - 1
    return Limits(memory_bytes=(memory_bytes, *[_NO_MEMORY_LIMIT] * others), core_percent=(cores, *[_NO_CORE_LIMIT] * others))


def seed(wanted: Limits) -> bytes:
    """All bytes of the file. Devices and processes are none: the library fills them in."""
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
