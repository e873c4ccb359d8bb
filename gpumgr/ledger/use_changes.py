"""What changes from sample to sample: allocations that exceed their memory limit, and processes without an allocation (unattributed ones).

An allocation is over its limit on a GPU after `samples` readings in a row above the limit plus the slack. It is within the limit again
after `samples` readings in a row that are not above this sum. A sample in which its memory is not known does not count.

An unattributed process is reported once, after EXPECTED_SECONDS, because the driver lists processes of an ended container a moment longer.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.node_use import AllocationOnGpu, ContainerUse, NodeUse, UnattributedProcess
from gpumgr.ledger.quarantine import EXPECTED_SECONDS


class _Streak(msgspec.Struct, frozen=True, kw_only=True):
    """`against` counts the readings in a row that contradict `over`."""

    over: bool = False
    against: int = 0


_WITHIN: Final = _Streak()


class OverLimitState(msgspec.Struct, frozen=True, kw_only=True):
    streaks: Mapping[AllocationOnGpu, _Streak] = msgspec.field(default_factory=dict)

    @property
    def over(self) -> frozenset[AllocationOnGpu]:
        return frozenset(place for place, streak in self.streaks.items() if streak.over)


class OverLimitChange(msgspec.Struct, frozen=True, kw_only=True):
    state: OverLimitState
    began: tuple[ContainerUse, ...] = ()
    ended: tuple[ContainerUse, ...] = ()


def apply_readings(state: OverLimitState, uses: Iterable[ContainerUse], *, samples: int, slack_bytes: int) -> OverLimitChange:
    """`uses`: of all existing allocations; uses without a limit are ignored."""
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


class KnownProcess(msgspec.Struct, frozen=True, kw_only=True):
    """An unattributed process. `gpus`: where it was seen last. `since`: when it was seen first, in monotonic seconds."""

    gpus: frozenset[GpuName]
    since: float
    reported: bool = False


KnownProcesses = Mapping[Process, KnownProcess]


def update_unattributed(
    known: KnownProcesses, use: NodeUse, started: Mapping[int, int], *, now: float
) -> tuple[KnownProcesses, Mapping[Process, Sequence[UnattributedProcess]]]:
    """The unattributed processes after a sample, and the ones to report, with their use of each GPU. `started`: pid -> start time in clock
    ticks since boot, for the processes that run. `now`: monotonic seconds. A process stays known while its GPU's list can't be read, or its
    container is unknown."""
    here: dict[Process, list[UnattributedProcess]] = {}
    for (_, pid), found in sorted(use.unattributed.items(), key=lambda item: (item[0][1], item[0][0])):
        if pid in started:
            here.setdefault((pid, started[pid]), []).append(found)
    seen = {
        process: KnownProcess(
            gpus=frozenset(each.gpu for each in found),
            since=(since := known[process].since if process in known else now),
            reported=now - since >= EXPECTED_SECONDS,
        )
        for process, found in here.items()
    }
    unknown = {pid for _, pid in use.unknown}
    hidden = {
        process: each
        for process, each in known.items()
        if process not in seen
        and started.get(process[0], process[1]) == process[1]
        and (process[0] in unknown or not each.gpus <= use.gpus.keys())
    }
    before = {process for process, each in known.items() if each.reported}
    new = {process: here[process] for process, each in seen.items() if each.reported and process not in before}
    return {**hidden, **seen}, new
