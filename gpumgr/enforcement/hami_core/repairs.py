"""What must be written into a region so that it says again what was granted. Pure; one word for each repair."""

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from gpumgr.enforcement.hami_core import layouts
from gpumgr.enforcement.hami_core.region import Write
from gpumgr.enforcement.hami_core.seed import MEBIBYTE, SWITCH_ON, Limits
from gpumgr.enforcement.hami_core.view import RegionView, Slot

#: A writer that keeps a slot's seqlock odd for longer than this, and does not run, was killed while it wrote.
STUCK_SECONDS: Final = 2.0

RepairCode = Literal["memory_limit", "core_limit", "priority", "switch", "hostpid", "seqlock"]
#: Only the container can have changed these. (The library itself never writes the switch; with policy "force" nobody reads it.)
TAMPERING: Final[frozenset[RepairCode]] = frozenset({"memory_limit", "core_limit", "priority"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One word to write; `message` says what was found there."""

    code: RepairCode
    write: Write
    message: str


def drifted(seen: RegionView, wanted: Limits) -> Iterator[Repair]:
    """Limits, priority and switch that are not what was granted."""
    layout = seen.layout
    pairs = zip(seen.limits_bytes, wanted.memory_bytes, strict=True)
    for device, (found, granted) in enumerate(pairs):
        if found != granted:
            said = f"memory limit {found // MEBIBYTE} MiB instead of {granted // MEBIBYTE} MiB (device {device})"
            yield _repair("memory_limit", layout.limit + 8 * device, struct.pack("<Q", granted), said)
    for device, (found, granted) in enumerate(zip(seen.core_limits_percent, wanted.core_percent, strict=True)):
        if found != granted:
            said = f"core limit {found} % instead of {granted} % (device {device})"
            yield _repair("core_limit", layout.sm_limit + 8 * device, struct.pack("<Q", granted), said)
    if seen.priority != wanted.priority:
        said = f"priority {seen.priority} instead of {wanted.priority}"
        yield _repair("priority", layout.priority, struct.pack("<i", wanted.priority), said)
    if seen.utilization_switch != SWITCH_ON:
        said = f"utilisation switch {seen.utilization_switch} instead of {SWITCH_ON}"
        yield _repair("switch", layout.utilization_switch, struct.pack("<i", SWITCH_ON), said)


def unknown_hosts(seen: RegionView, pids: Collection[int], host_of: Callable[[int], int | None]) -> Iterator[Repair]:
    """Slots whose process has no number on the host, or a stranger's: the library does not limit the cores of such a process.

    `pids`: the host's, of the container's processes; `host_of`: the one of them that has this number in the container. A stuck slot is
    left alone: its old number on the host tells whether its writer lives.
    """
    for slot in seen.slots:
        if not slot.live or slot.stuck or slot.hostpid in pids:
            continue
        host = host_of(slot.pid)
        if host is not None:
            said = f"host's number {slot.hostpid} of process {slot.pid} instead of {host}"
            yield _repair("hostpid", seen.layout.slot_at(slot.index) + layouts.SLOT_HOSTPID, struct.pack("<i", host), said)


def abandoned(seen: RegionView, pids: Collection[int], host_of: Callable[[int], int | None]) -> Iterator[Slot]:
    """Slots that are stuck and whose writer does not run. Its number in the container may be another process's by now."""
    for slot in seen.slots:
        if slot.stuck and slot.hostpid not in pids and (slot.hostpid != 0 or host_of(slot.pid) is None):
            yield slot


def unstuck(seen: RegionView, slot: Slot) -> Repair:
    """Ends the waiting for a writer that is dead."""
    assert seen.layout.slot.seqlock is not None
    assert slot.seqlock is not None
    even = (slot.seqlock + 1) % (1 << 64)
    offset = seen.layout.slot_at(slot.index) + seen.layout.slot.seqlock
    return _repair(
        "seqlock", offset, struct.pack("<Q", even), f"slot {slot.index} left locked by process {slot.pid}, which is dead"
    )


def _repair(code: RepairCode, offset: int, data: bytes, message: str) -> Repair:
    return Repair(code=code, write=Write(offset=offset, data=data), message=message)
