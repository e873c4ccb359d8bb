"""A new region for one container, as the library would make it, but with the granted limits. Pure.

The library prefers the region to its environment.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpumgr.common.units import CORES_PER_GPU
from gpumgr.enforcement.hami_core import layout
from gpumgr.ledger.gpu_share import SharedGpu

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
    """The limits in a region: for each of 16 devices bytes (0 = unlimited) and percent (100 = unlimited), the container's GPUs first."""

    memory_bytes: tuple[int, ...]
    core_percent: tuple[int, ...]


def limits(gpus: Sequence[SharedGpu]) -> RegionLimits:
    """The limits of a share; its whole GPUs have none. Raises ValueError for what the library would read as "unlimited", or can't be
    expressed in its environment, and for several GPUs in an unknown order."""
    if len(gpus) > layout.DEVICES:
        raise ValueError(f"it shares {len(gpus)} GPUs: at most {layout.DEVICES} are valid")
    if len(gpus) > 1 and (unknown := [gpu.name for gpu in gpus if gpu.bus_id is None]):
        raise ValueError(f"the driver does not show the PCI bus id of GPU {unknown[0]}, which its place among several depends on")
    for gpu in gpus:
        if len(gpus) == 1 or not gpu.whole:
            _check(gpu)
    others = layout.DEVICES - len(gpus)
    return RegionLimits(
        memory_bytes=(*(_NO_MEMORY_LIMIT if gpu.whole else gpu.memory_bytes for gpu in gpus), *[_NO_MEMORY_LIMIT] * others),
        core_percent=(*(gpu.core_percent for gpu in gpus), *[_NO_CORE_LIMIT] * others),
    )


def _check(gpu: SharedGpu) -> None:
    if not 0 <= gpu.cores < CORES_PER_GPU:
        raise ValueError(f"{gpu.cores} cores are not a share of a GPU: 1 to 99 are valid, and 0 for no limit")
    if gpu.memory_bytes < MEBIBYTE or gpu.memory_bytes % MEBIBYTE or gpu.memory_bytes >= 1 << 63:
        raise ValueError(f"{gpu.memory_bytes} bytes are not a memory limit: whole MiB from 1 are valid")


def seed(wanted: RegionLimits) -> bytes:
    """All bytes of the file. It has no devices and processes: the library adds them."""
    content = bytearray(layout.FILE_BYTES)
    layout.HEAD.pack_into(content, 0, layout.MAGIC, *layout.VERSION)
    for semaphore in (layout.SEM, layout.SEM_POSTINIT):
        content[semaphore : semaphore + len(_FREE_SEMAPHORE)] = _FREE_SEMAPHORE
    layout.LIMITS.pack_into(content, layout.LIMIT, *wanted.memory_bytes)
    layout.LIMITS.pack_into(content, layout.SM_LIMIT, *wanted.core_percent)
    struct.pack_into("<iii", content, layout.UTILIZATION_SWITCH, SWITCH_ON, RECENT_KERNEL, PRIORITY)
    return bytes(content)
