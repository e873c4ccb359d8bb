"""Decodes a region. The container may have written any of its bytes: every value is bounded or left out. Pure."""

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpumgr.enforcement.hami_core import layouts
from gpumgr.enforcement.hami_core.layouts import Layout

#: No GPU has so much memory: a counter from here on is an underflow or forged.
IMPLAUSIBLE_BYTES: Final = 1 << 48
_UUID: Final = re.compile(rb"(GPU|MIG)-[0-9A-Fa-f-]{36}")
_I32: Final = struct.Struct("<i")
_U64: Final = struct.Struct("<Q")
_PIDS: Final = struct.Struct("<ii")

ProblemCode = Literal["header", "process_count", "uuid", "counter", "torn"]
#: Only a container that writes the region itself causes these; races of the library can cause the others.
TAMPERING: Final[frozenset[ProblemCode]] = frozenset({"header", "process_count", "uuid"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A value that was left out; `message` says which."""

    code: ProblemCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One process. `pid` in the container, `hostpid` on the host (0: unknown); `used_bytes` by device.

    `torn`: it was being written at every read. `seqlock` is odd while it is written; None: the layout has none.
    """

    index: int
    pid: int
    hostpid: int
    status: int
    used_bytes: tuple[int, ...]
    seqlock: int | None = None
    torn: bool = False

    @property
    def live(self) -> bool:
        """Whether a process has it. (The library counts the memory of abandoned slots too, until it cleans up.)"""
        return self.pid > 0 and self.status != 0

    @property
    def stuck(self) -> bool:
        """Whether readers in the container wait until the seqlock is even."""
        return self.seqlock is not None and self.seqlock % 2 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """One region at one time. Tuples by device have the region's device count, at least 1; limits always 16.

    `slots` are the live ones and the stuck ones; `used_bytes` is what the live ones hold, `stale_bytes` all others. Counters are
    the library's, bounded.
    """

    layout: Layout
    device_count: int
    uuids: tuple[str, ...]
    limits_bytes: tuple[int, ...]
    core_limits_percent: tuple[int, ...]
    slots: tuple[Slot, ...]
    used_bytes: tuple[int, ...]
    stale_bytes: tuple[int, ...]
    utilization_switch: int
    recent_kernel: int
    priority: int
    last_kernel_time: int | None
    problems: tuple[Problem, ...] = ()


def process_count(tail: bytes) -> int:
    """The number of slots to read, bounded."""
    (count,) = _I32.unpack_from(tail, 0)
    return int(min(max(count, 0), layouts.SLOTS))


def device_count(layout: Layout, header: bytes) -> int:
    """At least 1: the library fills it in only when a process has asked NVML."""
    (count,) = _U64.unpack_from(header, layout.device_num)
    return int(min(max(count, 1), layouts.DEVICES))


def seqlock_of(layout: Layout, slot: bytes) -> int | None:
    return None if layout.slot.seqlock is None else int(_U64.unpack_from(slot, layout.slot.seqlock)[0])


def decode(layout: Layout, header: bytes, tail: bytes, slots: Sequence[bytes], torn: Iterable[int] = ()) -> RegionView:
    """`header`: up to the slots; `tail`: from the process count to the structure's end; `torn`: slots that were being written."""
    devices = device_count(layout, header)
    marked = frozenset(torn)
    problems = [*_header_problems(layout, header), *_count_problems(tail)]
    problems += [Problem(code="torn", message=f"slot {index} is being written") for index in sorted(marked)]
    decoded = [_slot(layout, index, raw, devices, index in marked, problems) for index, raw in enumerate(slots)]
    uuids = _uuids(layout, header, problems)
    last = None if layout.last_kernel_time is None else _U64.unpack_from(tail, layout.last_kernel_time - layout.proc_num)[0]
    return RegionView(
        layout=layout,
        device_count=devices,
        uuids=uuids,
        limits_bytes=_u64s(header, layout.limit),
        core_limits_percent=_u64s(header, layout.sm_limit),
        slots=tuple(slot for slot in decoded if slot.live or slot.stuck),
        used_bytes=_sum((slot for slot in decoded if slot.live), devices),
        stale_bytes=_sum((slot for slot in decoded if not slot.live), devices),
        utilization_switch=_word(layout, tail, layout.utilization_switch),
        recent_kernel=_word(layout, tail, layout.recent_kernel),
        priority=_word(layout, tail, layout.priority),
        last_kernel_time=last,
        problems=tuple(problems),
    )


def _word(layout: Layout, tail: bytes, offset: int) -> int:
    return int(_I32.unpack_from(tail, offset - layout.proc_num)[0])


def _u64s(header: bytes, offset: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{layouts.DEVICES}Q", header, offset)


def _header_problems(layout: Layout, header: bytes) -> list[Problem]:
    magic, *version = layouts.HEAD.unpack_from(header)
    if magic != layouts.MAGIC:
        return [Problem(code="header", message=f"it begins with {magic} instead of {layouts.MAGIC}")]
    if layout.version not in (None, tuple(version)):
        return [Problem(code="header", message=f"it has version {version[0]}.{version[1]} instead of {layout.name}")]
    return []


def _count_problems(tail: bytes) -> list[Problem]:
    (count,) = _I32.unpack_from(tail, 0)
    if 0 <= count <= layouts.SLOTS:
        return []
    return [Problem(code="process_count", message=f"it counts {count} processes of at most {layouts.SLOTS}")]


def _slot(layout: Layout, index: int, raw: bytes, devices: int, torn: bool, problems: list[Problem]) -> Slot:
    pid, hostpid = _PIDS.unpack_from(raw, layouts.SLOT_PID)
    first, stride = layout.slot.used + layouts.USED_TOTAL, layout.slot.used_stride
    totals = [_U64.unpack_from(raw, first + device * stride)[0] for device in range(devices)]
    if any(total >= IMPLAUSIBLE_BYTES for total in totals):
        problems.append(Problem(code="counter", message=f"slot {index} counts {max(totals)} bytes in use, taken as none"))
    return Slot(
        index=index,
        pid=pid,
        hostpid=hostpid,
        status=_I32.unpack_from(raw, layout.slot.status)[0],
        used_bytes=tuple(total if total < IMPLAUSIBLE_BYTES else 0 for total in totals),
        seqlock=seqlock_of(layout, raw),
        torn=torn,
    )


def _uuids(layout: Layout, header: bytes, problems: list[Problem]) -> tuple[str, ...]:
    """The cells that hold a UUID, in order. Others are empty or a problem; their text is not used."""
    found = []
    for device in range(layouts.DEVICES):
        start = layout.uuids + device * layouts.UUID_BYTES
        cell = header[start : start + layouts.UUID_BYTES].partition(b"\0")[0]
        if _UUID.fullmatch(cell):
            found.append(cell.decode("ascii"))
        elif cell:
            problems.append(Problem(code="uuid", message=f"the name of device {device} is not a GPU's UUID"))
    return tuple(found)


def _sum(slots: Iterable[Slot], devices: int) -> tuple[int, ...]:
    totals = [0] * devices
    for slot in slots:
        for device, used in enumerate(slot.used_bytes):
            totals[device] += used
    return tuple(totals)
