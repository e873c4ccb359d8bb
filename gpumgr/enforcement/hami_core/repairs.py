"""The words to write into a region so that it has the granted limits again. Pure; one word for each repair."""

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.seed import MEBIBYTE, PRIORITY, SWITCH_ON, RegionLimits
from gpumgr.enforcement.hami_core.view import ProcessSlot, RegionView

#: A writer that keeps a slot's seqlock odd for longer than this, and does not run, was killed while it wrote.
STUCK_SECONDS: Final = 2.0

RepairCode = Literal["memory_limit", "core_limit", "priority", "switch", "hostpid", "seqlock"]
#: Only the container can have changed these. (The library never writes the switch, and does not read it with policy "force".)
TAMPERING: Final[frozenset[RepairCode]] = frozenset({"memory_limit", "core_limit", "priority"})


@dataclass(frozen=True, slots=True)
class Repair:
    """One word to write; `message` describes what was found there."""

    code: RepairCode
    offset: int
    data: bytes
    message: str


def drifted(seen: RegionView, wanted: RegionLimits) -> Iterator[Repair]:
    """Limits, priority and switch that are not what was granted."""
    for device, (found, granted) in enumerate(zip(seen.limits_bytes, wanted.memory_bytes, strict=True)):
        if found != granted:
            message = f"memory limit {found // MEBIBYTE} MiB instead of {granted // MEBIBYTE} MiB (device {device})"
            yield Repair("memory_limit", layout.LIMIT + 8 * device, struct.pack("<Q", granted), message)
    for device, (found, granted) in enumerate(zip(seen.core_limits_percent, wanted.core_percent, strict=True)):
        if found != granted:
            message = f"core limit {found} % instead of {granted} % (device {device})"
            yield Repair("core_limit", layout.SM_LIMIT + 8 * device, struct.pack("<Q", granted), message)
    if seen.priority != PRIORITY:
        message = f"priority {seen.priority} instead of {PRIORITY}"
        yield Repair("priority", layout.PRIORITY, struct.pack("<i", PRIORITY), message)
    if seen.utilization_switch != SWITCH_ON:
        message = f"utilisation switch {seen.utilization_switch} instead of {SWITCH_ON}"
        yield Repair("switch", layout.UTILIZATION_SWITCH, struct.pack("<i", SWITCH_ON), message)


def unknown_hosts(seen: RegionView, pids: Collection[int], host_of: Callable[[int], int | None]) -> Iterator[Repair]:
    """Slots the process of which has no pid on the host, or another container's: the library does not limit its cores.

    `pids`: the host's, of the container's processes; `host_of`: the one of them with a given pid in the container. A stuck slot is not
    changed: its pid on the host shows whether its writer runs.
    """
    for slot in seen.slots:
        if not slot.live or slot.stuck or slot.hostpid in pids:
            continue
        host = host_of(slot.pid)
        if host is not None:
            message = f"host pid {slot.hostpid} of process {slot.pid} instead of {host}"
            yield Repair("hostpid", layout.slot_at(slot.index) + layout.SLOT_HOSTPID, struct.pack("<i", host), message)


def abandoned(seen: RegionView, pids: Collection[int], host_of: Callable[[int], int | None]) -> Iterator[ProcessSlot]:
    """Slots that are stuck and have no running writer. Its pid in the container may be another process's by now."""
    for slot in seen.slots:
        if slot.stuck and slot.hostpid not in pids and (slot.hostpid != 0 or host_of(slot.pid) is None):
            yield slot


def unstuck(slot: ProcessSlot) -> Repair:
    """Unlocks a slot the writer of which has ended."""
    even = struct.pack("<Q", (slot.seqlock + 1) % (1 << 64))
    message = f"slot {slot.index} left locked by process {slot.pid}, which has ended"
    return Repair("seqlock", layout.slot_at(slot.index) + layout.SLOT_SEQLOCK, even, message)
