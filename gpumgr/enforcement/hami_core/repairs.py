"""What the agent writes into regions (see `region`). Pure.

A repair writes one word: a granted limit, or what the library can't find out or repair (a host pid, the lock of a killed process). The word
`recent_kernel` implements priorities: launches of a container wait while a container with a lower priority number launches on the same GPU.
The library sets that word at each launch, and delays launches while the word is below 0. The library does both only in containers with a
limit of cores. Source: HAMi 2.10, cmd/vGPUmonitor/feedback.go, and HAMi-core's rate_limiter.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from gpumgr.enforcement.container_processes import HostsOf
from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.region import (
    MEBIBYTE,
    PRIORITY,
    RECENT_KERNEL,
    SWITCH_ON,
    ProcessSlot,
    RegionLimits,
    RegionView,
)
from gpumgr.ledger.gpu_share import GpuShare

#: If a slot's seqlock is odd for longer than this, and its writer does not run, the writer was killed while it wrote.
STUCK_SECONDS: Final = 2.0
#: A process in cuInit holds the semaphore `postinit` for a second at most. If the waiters and the slots' pids stay the same for this time,
#: and no possible holder runs, the holder is gone.
HELD_SECONDS: Final = 5.0
#: If they stay the same for this time, `postinit` is freed even if a possible holder runs: the library's waiters give up then, too.
HELD_AT_MOST_SECONDS: Final = 30.0

RepairCode = Literal["memory_limit", "core_limit", "priority", "switch", "hostpid", "seqlock", "postinit"]
#: Reported, since only the container can have changed them. A changed switch is only restored: with GPU_CORE_UTILIZATION_POLICY=force,
#: which the agent sets, the library ignores it.
TAMPERING: Final[frozenset[RepairCode]] = frozenset({"memory_limit", "core_limit", "priority"})


class Repair(msgspec.Struct, frozen=True):
    """One word to write; `message` describes what was found there."""

    code: RepairCode
    offset: int
    data: bytes
    message: str


def drifted(seen: RegionView, wanted: RegionLimits) -> Iterator[Repair]:
    """Repairs for limits, priority and switch that differ from what was granted."""
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


def wrong_hosts(seen: RegionView, hosts_of: HostsOf) -> Iterator[tuple[int, bool, Repair]]:
    """For each slot without a host pid, or with a wrong one, yields the right host pid, whether the slot must be left alone for now,
    and the repair. Without the right host pid the library does not limit the process's cores.

    A pid with several candidates on the host (nested pid namespaces) is skipped. A stuck slot is left alone: its host pid shows whether its
    writer runs. A slot without a host pid is left alone while the library looks for host pids: its process may still find its own.
    """
    for slot in seen.slots:
        hosts = hosts_of(slot.pid)
        if not slot.live or slot.hostpid in hosts or len(hosts) != 1:
            continue
        message = f"host pid {slot.hostpid} of process {slot.pid} instead of {hosts[0]}"
        repair = Repair("hostpid", layout.slot_at(slot.index) + layout.SLOT_HOSTPID, struct.pack("<i", hosts[0]), message)
        yield hosts[0], slot.stuck or (slot.hostpid == 0 and seen.postinit == 0), repair


def abandoned(seen: RegionView, hosts_of: HostsOf) -> Iterator[ProcessSlot]:
    """Slots that are stuck and have no running writer. Another process may have the writer's pid in the container by now."""
    for slot in seen.slots:
        hosts = hosts_of(slot.pid)
        if slot.stuck and (slot.hostpid not in hosts if slot.hostpid else not hosts):
            yield slot


def holder_may_run(seen: RegionView, hosts_of: HostsOf) -> bool:
    """Whether a running process may hold the semaphore `postinit`.

    The holder and the processes that wait have no host pid yet. So a holder exists only if the processes without a host pid are more than
    the waiting ones.
    """
    starting = sum(slot.live and slot.hostpid == 0 and bool(hosts_of(slot.pid)) for slot in seen.slots)
    return starting > seen.postinit_waiters


def released() -> Repair:
    """Frees the semaphore `postinit` after the end of its holder. Its waiters must be woken."""
    message = "a process that was killed in cuInit left other processes waiting"
    return Repair("postinit", layout.SEM_POSTINIT, struct.pack("<I", 1), message)


def unstuck(slot: ProcessSlot) -> Repair:
    """Unlocks a slot after the end of its writer."""
    even = struct.pack("<Q", (slot.seqlock + 1) % (1 << 64))
    message = f"slot {slot.index} left locked by process {slot.pid}, which has ended"
    return Repair("seqlock", layout.slot_at(slot.index) + layout.SLOT_SEQLOCK, even, message)


_BLOCKED: Final = -1


def due(found: Mapping[GpuShare, int]) -> dict[GpuShare, int]:
    """The words `recent_kernel` to write. `found`: the present words of all running containers. Call it once a sample: a launch delays
    others until the next call. A larger word, which a container can write, counts as a launch."""
    aged = {share: min(word, RECENT_KERNEL) - 1 if word > 0 else word for share, word in found.items()}
    if len({share.priority for share in found}) < 2:
        return {share: 0 for share, word in found.items() if word < 0}
    active = [share for share, word in aged.items() if word > 0]
    wanted = {
        share: _BLOCKED if any(each.priority < share.priority and _share_a_gpu(each, share) for each in active) else max(word, 0)
        for share, word in aged.items()
    }
    return {share: word for share, word in wanted.items() if word != found[share]}


def _share_a_gpu(one: GpuShare, other: GpuShare) -> bool:
    return not {gpu.uuid for gpu in one.gpus}.isdisjoint(gpu.uuid for gpu in other.gpus)
