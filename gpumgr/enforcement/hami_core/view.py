"""Decodes a region. The container may have written any of its bytes: every value is bounded or left out."""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from gpumgr.enforcement.hami_core import layout

_UUID: Final = re.compile(rb"(GPU|MIG)-[0-9A-Fa-f-]{36}")
ProblemCode = Literal["header", "process_count", "uuid"]
#: A value that only a container that writes the region itself causes, and a message that says which.
RegionProblem = tuple[ProblemCode, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """One process. `pid` in the container, `hostpid` on the host (0: unknown). `seqlock` is odd while the slot is written."""

    index: int
    pid: int
    hostpid: int
    status: int
    seqlock: int

    @property
    def live(self) -> bool:
        """Whether a process has it."""
        return self.pid > 0 and self.status != 0

    @property
    def stuck(self) -> bool:
        """Whether readers in the container wait until the seqlock is even."""
        return self.seqlock % 2 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """One region at one time. `slots` are the live ones and the stuck ones. `postinit` is 0 while a process looks for its host pid.

    `postinit_waiters`: of it; one that was killed may still be counted. `recent_kernel`: above 0 after a launch, below 0 while launches
    must wait.
    """

    limits_bytes: tuple[int, ...]
    core_limits_percent: tuple[int, ...]
    slots: tuple[ProcessSlot, ...]
    utilization_switch: int
    recent_kernel: int
    priority: int
    postinit: int
    postinit_waiters: int
    problems: tuple[RegionProblem, ...] = ()


def decode(read: Callable[[int, int], bytes]) -> RegionView:
    """`read` returns the bytes at an offset, of a given number; what it raises is raised."""
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
        problems=tuple(_problems(header, count)),
    )


def _problems(header: bytes, count: int) -> Iterator[RegionProblem]:
    magic, *version = layout.HEAD.unpack_from(header)
    if magic != layout.MAGIC:
        yield "header", f"it begins with {magic} instead of {layout.MAGIC}"
    elif tuple(version) != layout.VERSION:
        yield "header", f"it has version {version[0]}.{version[1]} instead of v1.2"
    if not 0 <= count <= layout.SLOTS:
        yield "process_count", f"it counts {count} processes of at most {layout.SLOTS}"
    for device in range(layout.DEVICES):
        start = layout.UUIDS + device * layout.UUID_BYTES
        cell = header[start : start + layout.UUID_BYTES].partition(b"\0")[0]
        if cell and not _UUID.fullmatch(cell):
            yield "uuid", f"the name of device {device} is not a GPU's UUID"


def _slot(index: int, slots: bytes) -> ProcessSlot:
    start = index * layout.SLOT_BYTES
    pid, hostpid = struct.unpack_from("<ii", slots, start + layout.SLOT_PID)
    status, seqlock = struct.unpack_from("<i4xQ", slots, start + layout.SLOT_STATUS)
    return ProcessSlot(index=index, pid=pid, hostpid=hostpid, status=status, seqlock=seqlock)
