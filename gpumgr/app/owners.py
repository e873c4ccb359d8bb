"""Whose the processes on the GPUs are, out of the container runtime's names and the kernel's cgroups.

Rule 1. A container that shares a GPU is asked for its processes, not the other way round: that is one small file for each container,
        and a process can't hide from it.
Rule 2. Only processes left over are looked up one by one, once for each.
Rule 3. A slow runtime delays nobody: after `patience_seconds` what was known counts.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.quarantine import Process
from gpumgr.app.errand import Errand
from gpumgr.errors import CriError
from gpumgr.usage.claims import Claims
from gpumgr.usage.containers import Container

log = structlog.get_logger(__name__)

#: A process in no container, or in one without names yet, is looked up again after this time.
ASK_AGAIN_SECONDS: Final = 5.0


class Runtime(Protocol):
    """The container runtime's containers, out of memory (gpumgr.cri.containers.Containers)."""

    async def tick(self) -> None:
        """Asks the runtime if it is time to."""
        ...

    def running(self) -> Sequence[Container]: ...

    def pids(self, container: Container) -> tuple[int, ...]:
        """All processes in its cgroup and below. Called on a thread. Raises CriError."""
        ...

    async def of_process(self, pid: int, start_time: int) -> Container | None:
        """None: it runs in none of the kubelet's containers, or is gone. Without a name while the runtime is away."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """`owners`: pid -> its container, None = it runs in none; a pid that is missing is not known yet. `homes`: allocation -> the
    container that runs on it. `pids`: all processes of that container, ascending."""

    owners: Mapping[int, Container | None] = field(default_factory=dict)
    homes: Mapping[AllocationId, Container] = field(default_factory=dict)
    pids: Mapping[AllocationId, tuple[int, ...]] = field(default_factory=dict)


class Owners:
    """`clock` is monotonic, in seconds."""

    def __init__(self, runtime: Runtime, *, clock: Callable[[], float], patience_seconds: float) -> None:
        self._runtime, self._clock, self._patience_seconds = runtime, clock, patience_seconds
        self._listing, self._asking = Errand("list_containers"), Errand("look_up_processes")
        self._answers: dict[Process, tuple[Container | None, float]] = {}
        self._complaint = ""

    async def look(
        self, claims: Claims, tenants: Collection[AllocationId], seen: Collection[int], started: Mapping[int, int]
    ) -> Whereabouts:
        """`tenants`: allocations whose containers' processes are wanted. `seen`: pids to place; `started` maps them to their start
        times in clock ticks since boot, those that are gone are not in it."""
        deadline = self._clock() + self._patience_seconds
        await self._listing.send(self._runtime.tick, patience_seconds=self._patience_seconds)
        homes = self._homes(claims, tenants)
        pids = await asyncio.to_thread(self._read_pids, homes) if homes else {}
        owners: dict[int, Container | None] = {pid: homes[each] for each, inside in pids.items() for pid in inside}
        self._answers = {process: answer for process, answer in self._answers.items() if started.get(process[0]) == process[1]}
        left = [(pid, started[pid]) for pid in seen if pid in started and pid not in owners]
        due = [process for process in left if self._is_due(process)]
        if due:
            await self._asking.send(lambda: self._ask(due), patience_seconds=max(0.0, deadline - self._clock()))
        owners |= {process[0]: self._answers[process][0] for process in left if process in self._answers}
        return Whereabouts(owners=owners, homes=homes, pids=pids)

    async def close(self) -> None:
        await self._listing.close()
        await self._asking.close()

    def _homes(self, claims: Claims, tenants: Collection[AllocationId]) -> dict[AllocationId, Container]:
        homes: dict[AllocationId, Container] = {}
        for container in self._runtime.running():
            for allocation in claims.exact(container):
                known = homes.get(allocation.id)
                if allocation.id in tenants and (known is None or known.attempt <= container.attempt):
                    homes[allocation.id] = container
        return homes

    def _read_pids(self, homes: Mapping[AllocationId, Container]) -> dict[AllocationId, tuple[int, ...]]:
        """On a thread. A container whose processes can't be read has none; why is logged once."""
        pids: dict[AllocationId, tuple[int, ...]] = {}
        complaint = ""
        for allocation, container in homes.items():
            try:
                pids[allocation] = self._runtime.pids(container)
            except CriError as error:
                complaint = complaint or str(error)
        if complaint not in ("", self._complaint):
            log.warning("container_processes_unknown", reason=complaint)
        self._complaint = complaint
        return pids

    def _is_due(self, process: Process) -> bool:
        if process not in self._answers:
            return True
        container, asked_at = self._answers[process]
        return (container is None or not container.name) and self._clock() - asked_at >= ASK_AGAIN_SECONDS

    async def _ask(self, processes: Sequence[Process]) -> None:
        """Side by side: one question to the runtime answers for all processes whose container it did not list before."""
        await asyncio.gather(*map(self._ask_one, processes))

    async def _ask_one(self, process: Process) -> None:
        container = await self._runtime.of_process(*process)
        self._answers[process] = (container, self._clock())
