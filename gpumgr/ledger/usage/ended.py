"""The processes of containers that have just ended. The driver lists them a moment longer, and for EXPECTED_SECONDS that is normal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpumgr.common.units import Process
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.ledger.usage.allocation_index import AllocationIndex
from gpumgr.ledger.usage.containers import Container
from gpumgr.ledger.usage.node_use import NodeUse


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedContainers:
    """`ended`: the allocations that were freed in the last EXPECTED_SECONDS, with the time in monotonic seconds. `live`: those at the last
    sample. `processes`: the processes of both that were attributed to them."""

    live: Mapping[AllocationId, Allocation] = field(default_factory=dict)
    ended: Mapping[AllocationId, tuple[Allocation, float]] = field(default_factory=dict)
    processes: Mapping[Process, AllocationId] = field(default_factory=dict)

    def at(self, allocations: Mapping[AllocationId, Allocation], now: float) -> "EndedContainers":
        """A copy with the allocations of this time."""
        kept = {name: each for name, each in self.ended.items() if now - each[1] < EXPECTED_SECONDS}
        freed = {name: (each, now) for name, each in self.live.items() if name not in allocations}
        return replace(self, live=allocations, ended=kept | freed)

    def after(self, use: NodeUse, started: Mapping[int, int]) -> "EndedContainers":
        """A copy with the processes that a sample attributes. `started`: pid -> start time in clock ticks since boot."""
        before = {process: name for process, name in self.processes.items() if name in self.ended}
        now = {
            (pid, started[pid]): name for (name, _), each in use.containers.items() for pid in each.processes if pid in started
        }
        return replace(self, processes=before | now)

    def expected(self, use: NodeUse, started: Mapping[int, int], owners: Mapping[int, Container | None]) -> Iterator[Process]:
        """The unattributed processes of ended containers: attributed to them before, or in their cgroups."""
        index = AllocationIndex([each for each, _ in self.ended.values()])
        for gpu, pid in use.unattributed if self.ended else ():
            process, container = (pid, started.get(pid, 0)), owners.get(pid)
            if self.processes.get(process) in self.ended or (container and isinstance(index.owner(container, gpu), Allocation)):
                yield process
