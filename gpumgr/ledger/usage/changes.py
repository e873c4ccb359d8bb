"""What changes from sample to sample: allocations that exceed their memory limit, and processes of no container.

Limits are a state machine for each GPU of each allocation:
* An allocation is over its limit on a GPU after `samples` readings in a row above the limit plus the slack, and within it again after
  as many readings in a row that are not. Each change is reported once.
* A sample without the allocation's memory is no reading: it neither counts nor interrupts.
* An allocation that is gone is dropped without a report.

A process of no container either never had one, or is left over from a container that has just ended: the driver lists it a moment longer.
The first kind is reported at once, the second kind only after EXPECTED_SECONDS. Each process is reported once, even if its
GPU's process list can't be read, or its container is unknown, for a while.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.ledger.usage.join import AllocationIndex
from gpumgr.ledger.usage.node_use import AllocationOnGpu, Container, ContainerUse, NodeUse, UnattributedProcess


class _Streak(msgspec.Struct, frozen=True, kw_only=True):
    """`against` counts the readings in a row that contradict `over`."""

    over: bool = False
    against: int = 0


_WITHIN: Final = _Streak()


class OverLimitState(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two samples."""

    streaks: Mapping[AllocationOnGpu, _Streak] = msgspec.field(default_factory=dict)

    @property
    def over(self) -> frozenset[AllocationOnGpu]:
        return frozenset(place for place, streak in self.streaks.items() if streak.over)


class OverLimitChange(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a sample, and the uses that went over their limit or back within it."""

    state: OverLimitState
    began: tuple[ContainerUse, ...] = ()
    ended: tuple[ContainerUse, ...] = ()


def apply_readings(state: OverLimitState, uses: Iterable[ContainerUse], *, samples: int, slack_bytes: int) -> OverLimitChange:
    """The state after one sample. `uses`: all uses of existing allocations; uses without a limit are ignored."""
    streaks: dict[AllocationOnGpu, _Streak] = {}
    began, ended = list[ContainerUse](), list[ContainerUse]()
    for use in uses:
        if use.memory_limit_bytes is None:
            continue
        before = state.streaks.get((use.allocation, use.gpu), _WITHIN)
        after = before
        if use.memory_bytes is not None:
            after = _after_reading(before, use.memory_bytes > use.memory_limit_bytes + slack_bytes, samples)
        if after.over != before.over:
            (began if after.over else ended).append(use)
        streaks[use.allocation, use.gpu] = after
    return OverLimitChange(state=OverLimitState(streaks=streaks), began=tuple(began), ended=tuple(ended))


def _after_reading(streak: _Streak, above: bool, samples: int) -> _Streak:
    if above == streak.over:
        return replace(streak, against=0) if streak.against else streak
    if streak.against + 1 < samples:
        return _Streak(over=streak.over, against=streak.against + 1)
    return _Streak(over=above)


#: Unattributed processes that were reported -> the GPUs on which each was seen last.
KnownProcesses = Mapping[Process, frozenset[GpuName]]


class UnattributedChange(msgspec.Struct, frozen=True, kw_only=True):
    """`new`: each process with its use of each GPU, ordered by pid. `gone`: ended, or attributed now."""

    known: KnownProcesses = msgspec.field(default_factory=dict)
    new: Mapping[Process, tuple[UnattributedProcess, ...]] = msgspec.field(default_factory=dict)
    gone: frozenset[Process] = frozenset()


def update_unattributed(
    known: KnownProcesses, use: NodeUse, started: Mapping[int, int], expected: Collection[Process] = ()
) -> UnattributedChange:
    """The state after one sample. `started`: pid -> start time in clock ticks since boot; a pid without a start time has just ended.
    `expected`: processes of containers that ended a moment ago; they are not reported as new.

    Known processes stay known while a GPU's list can't be read, and while their container is unknown.
    """
    here: dict[Process, list[UnattributedProcess]] = {}
    for (_, pid), found in sorted(use.unattributed.items(), key=lambda item: (item[0][1], item[0][0])):
        if pid in started and ((pid, started[pid]) in known or (pid, started[pid]) not in expected):
            here.setdefault((pid, started[pid]), []).append(found)
    seen = {process: frozenset(each.gpu for each in unattributed) for process, unattributed in here.items()}
    hidden = {
        process: gpus
        for process, gpus in known.items()
        if process not in seen
        and started.get(process[0], process[1]) == process[1]
        and (process[0] in use.unknown or not gpus <= use.gpus.keys())
    }
    return UnattributedChange(
        known={**hidden, **seen},
        new={process: tuple(unattributed) for process, unattributed in here.items() if process not in known},
        gone=frozenset(known.keys() - seen.keys() - hidden.keys()),
    )


class EndedContainers(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: the allocations that were freed in the last EXPECTED_SECONDS, with the time in monotonic seconds. `live`: the
    allocations at the last sample. `processes`: the processes that samples attributed to either."""

    live: Mapping[AllocationId, Allocation] = msgspec.field(default_factory=dict)
    ended: Mapping[AllocationId, tuple[Allocation, float]] = msgspec.field(default_factory=dict)
    processes: Mapping[Process, AllocationId] = msgspec.field(default_factory=dict)

    def with_allocations(self, allocations: Mapping[AllocationId, Allocation], now: float) -> "EndedContainers":
        """A copy with the allocations at `now`, in monotonic seconds."""
        kept = {name: each for name, each in self.ended.items() if now - each[1] < EXPECTED_SECONDS}
        freed = {name: (each, now) for name, each in self.live.items() if name not in allocations}
        return replace(self, live=allocations, ended=kept | freed)

    def with_processes(self, use: NodeUse, started: Mapping[int, int]) -> "EndedContainers":
        """A copy with the processes that a sample attributes. `started`: pid -> start time in clock ticks since boot."""
        before = {process: name for process, name in self.processes.items() if name in self.ended}
        now = {
            (pid, started[pid]): name for (name, _), each in use.containers.items() for pid in each.processes if pid in started
        }
        return replace(self, processes=before | now)

    def expected(self, use: NodeUse, started: Mapping[int, int], owners: Mapping[int, Container | None]) -> Iterator[Process]:
        """The unattributed processes of ended containers: an earlier sample attributed the process to such a container, or the process is
        in its cgroup."""
        index = AllocationIndex([each for each, _ in self.ended.values()])
        for gpu, pid in use.unattributed if self.ended else ():
            process, container = (pid, started.get(pid, 0)), owners.get(pid)
            if self.processes.get(process) in self.ended or (container and isinstance(index.owner(container, gpu), Allocation)):
                yield process
