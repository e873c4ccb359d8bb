"""Who is over its memory: a state machine over samples, for each allocation by itself.

Law 1. An allocation goes over after `samples` readings in a row above its limit and the slack, and comes back after as many in a row
       that are not; each is told once, and the two alternate.
Law 2. A sample that does not tell its memory is no reading: it counts for nothing and interrupts nothing.
Law 3. Whoever is gone is forgotten without a word.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpumgr.allocator.ledger import AllocationId
from gpumgr.usage.picture import ContainerUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`against` counts the readings in a row that speak against `over`."""

    over: bool = False
    against: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The state between two samples."""

    standings: Mapping[AllocationId, Standing] = field(default_factory=dict)

    @property
    def over(self) -> frozenset[AllocationId]:
        return frozenset(allocation for allocation, standing in self.standings.items() if standing.over)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The state after a sample, and whom it changed."""

    state: Excess
    began: tuple[ContainerUse, ...] = ()
    ended: tuple[ContainerUse, ...] = ()


def weigh(state: Excess, uses: Iterable[ContainerUse], *, samples: int, slack_bytes: int) -> Weighed:
    """After one sample. `uses`: one for each allocation that still is; those without a limit are passed over."""
    standings: dict[AllocationId, Standing] = {}
    began, ended = list[ContainerUse](), list[ContainerUse]()
    for use in uses:
        if use.memory_limit_bytes is None:
            continue
        before = state.standings.get(use.allocation, Standing())
        after = before
        if use.memory_bytes is not None:
            after = _read(before, use.memory_bytes > use.memory_limit_bytes + slack_bytes, samples)
        if after.over != before.over:
            (began if after.over else ended).append(use)
        standings[use.allocation] = after
    return Weighed(state=Excess(standings=standings), began=tuple(began), ended=tuple(ended))


def _read(standing: Standing, above: bool, samples: int) -> Standing:
    if above == standing.over:
        return Standing(over=standing.over)
    if standing.against + 1 < samples:
        return Standing(over=standing.over, against=standing.against + 1)
    return Standing(over=above)
