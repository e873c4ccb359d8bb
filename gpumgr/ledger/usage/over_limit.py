"""Which allocations are over their memory limit on which GPU: a state machine over samples, for each GPU of each allocation.

Invariants:
* An allocation is over its limit on a GPU after `samples` readings in a row above the limit plus the slack, and within it again after
  as many readings in a row that are not. Each change is reported once; the two alternate.
* A sample without the allocation's memory is no reading: it neither counts nor interrupts.
* An allocation that is gone is dropped without a report.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpumgr.ledger.usage.node_use import AllocationOnGpu, ContainerUse


@dataclass(frozen=True, slots=True, kw_only=True)
class _Streak:
    """`against` counts the readings in a row that contradict `over`."""

    over: bool = False
    against: int = 0


_WITHIN: Final = _Streak()


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimitState:
    """The state between two samples."""

    streaks: Mapping[AllocationOnGpu, _Streak] = field(default_factory=dict)

    @property
    def over(self) -> frozenset[AllocationOnGpu]:
        return frozenset(place for place, streak in self.streaks.items() if streak.over)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimitChange:
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
            after = _read(before, use.memory_bytes > use.memory_limit_bytes + slack_bytes, samples)
        if after.over != before.over:
            (began if after.over else ended).append(use)
        streaks[use.allocation, use.gpu] = after
    return OverLimitChange(state=OverLimitState(streaks=streaks), began=tuple(began), ended=tuple(ended))


def _read(streak: _Streak, above: bool, samples: int) -> _Streak:
    if above == streak.over:
        return replace(streak, against=0) if streak.against else streak
    if streak.against + 1 < samples:
        return _Streak(over=streak.over, against=streak.against + 1)
    return _Streak(over=above)
