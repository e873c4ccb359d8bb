"""Maps GPU processes to containers, by the container runtime's list and the kernel's cgroups.

- The processes of a container that shares a GPU are read from its cgroup, which no process can leave.
- Every other GPU process is looked up by its own cgroup: once if it is in a container, else again after RETRY_SECONDS.
- A slow container runtime delays a call by at most `timeout_seconds`; then its last answers are used.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog

from gpumgr.common.errors import CriError
from gpumgr.common.units import Process
from gpumgr.ledger.join import AllocationIndex
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.runtime.containers import Containers

log = structlog.get_logger(__name__)

#: How long after a lookup a process in no container is looked up again.
RETRY_SECONDS: Final = 5.0


class ProcessOwnership(msgspec.Struct, frozen=True, kw_only=True):
    """`owners`: pid -> its container; None if it is in none; missing if it is not known yet. `listed`: the runtime has listed the
    containers since the agent's start.

    `containers`: allocation -> the containers that run on it (several can use a claim). `pids`: allocation -> all processes of these
    containers, ascending; missing if a container's cgroup can't be read.
    """

    owners: Mapping[int, Container | None] = msgspec.field(default_factory=dict)
    listed: bool = False
    containers: Mapping[AllocationId, Sequence[Container]] = msgspec.field(default_factory=dict)
    pids: Mapping[AllocationId, tuple[int, ...]] = msgspec.field(default_factory=dict)


class ProcessOwners:
    """`clock` is monotonic, in seconds."""

    def __init__(self, runtime: Containers, *, clock: Callable[[], float], timeout_seconds: float) -> None:
        self._runtime, self.clock, self.timeout_seconds = runtime, clock, timeout_seconds
        self._list, self._look_up = BackgroundCall("list_containers"), BackgroundCall("look_up_processes")
        self._answers: dict[Process, tuple[Container | None, float]] = {}
        self._error = ""
        self.latest = ProcessOwnership()

    async def find(
        self, index: AllocationIndex, shares: Collection[AllocationId], seen: Collection[int], started: Mapping[int, int]
    ) -> ProcessOwnership:
        """Returns what can be found in time. `shares`: the allocations for `containers` and `pids`. `seen`: the pids for `owners`.
        `started`: pid -> start time in clock ticks since boot, of running processes."""
        deadline = self.clock() + self.timeout_seconds
        if self._runtime.due:
            await self._list.start(self._runtime.tick, timeout_seconds=self.timeout_seconds)
        listed, containers = self._runtime.listed, self._containers(index, shares)
        every = {each.id: each for users in containers.values() for each in users}
        inside = await asyncio.to_thread(self._read_pids, every.values()) if every else {}
        pids = {
            allocation: tuple(sorted(pid for each in users for pid in inside[each.id]))
            for allocation, users in containers.items()
            if all(each.id in inside for each in users)
        }
        owners: dict[int, Container | None] = {pid: every[each] for each, found in inside.items() for pid in found}
        self._answers = {process: answer for process, answer in self._answers.items() if started.get(process[0]) == process[1]}
        others = [(pid, started[pid]) for pid in seen if pid in started and pid not in owners]
        due = [process for process in others if self._is_due(process)]
        if due:
            await self._look_up.start(lambda: self._look_up_all(due), timeout_seconds=max(0.0, deadline - self.clock()))
        owners |= {process[0]: self._answers[process][0] for process in others if process in self._answers}
        self.latest = ProcessOwnership(owners=owners, listed=listed, containers=containers, pids=pids)
        return self.latest

    async def close(self) -> None:
        await self._list.close()
        await self._look_up.close()

    def _containers(self, index: AllocationIndex, shares: Collection[AllocationId]) -> dict[AllocationId, Sequence[Container]]:
        """Allocation -> the running containers that use it. After a restart of a container, only its latest start counts."""
        found: dict[AllocationId, dict[object, Container]] = {}
        for container in self._runtime.running():
            for allocation in index.exact(container):
                if allocation.id in shares:
                    users = found.setdefault(allocation.id, {})
                    user = (container.pod_uid, container.name) if allocation.claim else None
                    if (known := users.get(user)) is None or known.attempt <= container.attempt:
                        users[user] = container
        return {allocation: tuple(users.values()) for allocation, users in found.items()}

    def _read_pids(self, containers: Iterable[Container]) -> dict[str, tuple[int, ...]]:
        """Container's id -> its processes. Runs on a thread. Leaves out a container with an unreadable cgroup, and logs the reason once."""
        pids: dict[str, tuple[int, ...]] = {}
        reason = ""
        for container in containers:
            try:
                pids[container.id] = self._runtime.pids(container)
            except CriError as error:
                reason = reason or str(error)
        if reason not in ("", self._error):
            log.warning("container_processes_unknown", reason=reason)
        self._error = reason
        return pids

    def _is_due(self, process: Process) -> bool:
        if process not in self._answers:
            return True
        container, answered_at = self._answers[process]
        return container is None and self.clock() - answered_at >= RETRY_SECONDS

    async def _look_up_all(self, processes: Sequence[Process]) -> None:
        """All at the same time, so that one ListContainers call of the runtime serves all processes with unknown containers."""
        await asyncio.gather(*map(self._look_up_one, processes))

    async def _look_up_one(self, process: Process) -> None:
        try:
            container = await self._runtime.container_of(*process)
        except CriError:
            return  # `Containers` has logged that the runtime is not available
        # A process that has ended since the driver listed it must not count as a process outside of containers.
        if container is not None or self._runtime.runs(process):
            self._answers[process] = (container, self.clock())


#: A call that runs longer is logged, once.
LONG_SECONDS: Final = 5.0


class BackgroundCall:
    """Runs at most one call at a time. After a bounded time the call continues without the caller."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._task: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._logged = False

    async def start(self, work: Callable[[], Coroutine[Any, Any, None]], *, timeout_seconds: float) -> bool:
        """Starts `work` unless an earlier call still runs, and waits up to `timeout_seconds` for its end.

        Returns True if `work` has ended, False if it or an earlier call still runs. Raises what `work` raised; after a timeout the next
        `start` raises it.
        """
        if self._task is not None and not self._ended(self._task):
            self._log_if_long()
            return False
        self._task, self._started_at, self._logged = asyncio.create_task(work(), name=self._name), self._clock(), False
        await asyncio.wait({self._task}, timeout=timeout_seconds)
        return self._ended(self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
            if isinstance(outcome, Exception):
                log.warning("background_call_failed", call=self._name, error=str(outcome))

    def _log_if_long(self) -> None:
        seconds = self._clock() - self._started_at
        if seconds >= LONG_SECONDS and not self._logged:
            self._logged = True
            log.warning("background_call_takes_long", call=self._name, seconds=round(seconds, 1))

    def _ended(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            return False
        self._task = None
        task.result()
        return True
