"""Computes what the agent writes into regions, the files that it shares with HAMi-core's library ("the library"). Pure.

A repair writes one word: a granted limit, or what the library can't repair (a host pid, the lock of a killed process). The agent also
writes the region's word `recent_kernel`. While this word is below 0, the library delays the launches of a container with a limit of cores.
The agent sets it below 0 while a container with a lower priority number launches on the same GPU. Source: HAMi 2.10,
cmd/vGPUmonitor/feedback.go, and HAMi-core's rate_limiter.
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

#: If a seqlock is odd for longer, and the slot's writer does not run, the writer was killed.
STUCK_SECONDS: Final = 2.0
#: A process in cuInit holds the semaphore `postinit` for a second at most. If the waiters and the slots' pids stay the same for this time,
#: and no possible holder runs, the holder is gone.
HELD_SECONDS: Final = 5.0
#: After this time `postinit` is freed even if a possible holder runs: the library's waiters give up then, too.
HELD_AT_MOST_SECONDS: Final = 30.0

RepairCode = Literal["memory_limit", "core_limit", "priority", "switch", "hostpid", "seqlock", "postinit"]
#: Words that only the container can have changed. A changed switch is only restored, since the library ignores it with
#: GPU_CORE_UTILIZATION_POLICY=force, which the agent sets.
TAMPERING: Final[frozenset[RepairCode]] = frozenset({"memory_limit", "core_limit", "priority"})


class Repair(msgspec.Struct, frozen=True):
    """One word to write. `message`: what was there instead."""

    code: RepairCode
    offset: int
    data: bytes
    message: str


def drifted(seen: RegionView, wanted: RegionLimits) -> Iterator[Repair]:
    """Repairs of limits, priority and switch that differ from `wanted`."""
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
    """Yields (right host pid, whether the slot must be left alone for now, repair) for each slot without the right host pid. Without it the
    library does not limit the process's cores.

    A pid with several candidates (nested pid namespaces) is skipped. A stuck slot is left alone, because its host pid shows whether its
    writer runs. A slot without a host pid is left alone while the library looks for host pids.
    """
    for slot in seen.slots:
        hosts = hosts_of(slot.pid)
        if not slot.live or slot.hostpid in hosts or len(hosts) != 1:
            continue
        message = f"host pid {slot.hostpid} of process {slot.pid} instead of {hosts[0]}"
        repair = Repair("hostpid", layout.slot_at(slot.index) + layout.SLOT_HOSTPID, struct.pack("<i", hosts[0]), message)
        yield hosts[0], slot.stuck or (slot.hostpid == 0 and seen.postinit == 0), repair


def abandoned(seen: RegionView, hosts_of: HostsOf) -> Iterator[ProcessSlot]:
    """The stuck slots without a running writer. Another process may have the writer's pid in the container by now."""
    for slot in seen.slots:
        hosts = hosts_of(slot.pid)
        if slot.stuck and (slot.hostpid not in hosts if slot.hostpid else not hosts):
            yield slot


def holder_may_run(seen: RegionView, hosts_of: HostsOf) -> bool:
    """Whether a running process may hold the semaphore `postinit`. Neither its holder nor its waiters have a host pid yet. So if the
    running processes without a host pid are not more than the waiters, no holder runs."""
    starting = sum(slot.live and slot.hostpid == 0 and bool(hosts_of(slot.pid)) for slot in seen.slots)
    return starting > seen.postinit_waiters


def released() -> Repair:
    """Frees the semaphore `postinit`. Its waiters must then be woken."""
    message = "a process that was killed in cuInit left other processes waiting"
    return Repair("postinit", layout.SEM_POSTINIT, struct.pack("<I", 1), message)


def unstuck(slot: ProcessSlot) -> Repair:
    even = struct.pack("<Q", (slot.seqlock + 1) % (1 << 64))
    message = f"slot {slot.index} left locked by process {slot.pid}, which has ended"
    return Repair("seqlock", layout.slot_at(slot.index) + layout.SLOT_SEQLOCK, even, message)


_BLOCKED: Final = -1


def due(found: Mapping[GpuShare, int]) -> dict[GpuShare, int]:
    """The words `recent_kernel` to write. `found`: the words of all running containers.

    Call it once a sample: a launch delays others until the next call. A word above RECENT_KERNEL, which a container can write, counts as
    one launch.
    """
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
