"""A cache of the node's containers, which polls the container runtime. It also finds the container of a process.

A process belongs to the container with the process's cgroup or a cgroup above it. If the runtime does not list such a container (yet), the
container id in the cgroup's path counts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.ports import Runs
from gpumgr.common.errors import CriError
from gpumgr.common.units import Process
from gpumgr.ledger.node_use import Container
from gpumgr.runtime.cgroups import Cgroups, container_id_in, own_cgroup
from gpumgr.runtime.cri import CriClient

_log = structlog.get_logger(__name__)

#: How long polls stay frequent after a change, or after `wake`.
EAGER_SECONDS: Final = 15.0
EAGER_PERIOD_SECONDS: Final = 1.0
CALM_PERIOD_SECONDS: Final = 10.0
#: The shortest time between two polls for unknown containers, so that many starts at once cause few polls. A starting program may wait for
#: such a poll (backend vcuda).
UNKNOWN_PERIOD_SECONDS: Final = 0.02
#: A poll may begin this much too early, because calls of `tick` are not exactly a second apart.
_EARLY_SECONDS: Final = 0.1


class Containers:
    """Call `tick` at least once a second. While the runtime is unavailable, the cache stays, `unavailable` has the reason, and
    `container_of` raises CriError for a container that is not in the cache. `runs` returns whether a process still runs. `sleep` waits by
    `clock`."""

    def __init__(
        self,
        client: CriClient,
        cgroups: Cgroups,
        runs: Runs,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._cgroups = cgroups
        self.runs = runs
        self._clock = clock
        self._sleep = sleep
        self._polled_at = self._eager_until = float("-inf")
        self._polling = asyncio.Lock()
        #: Why the runtime does not answer; None while it answers, and before the first poll.
        self.unavailable: str | None = None
        self.listed = False
        self._table: dict[str, Container] = {}
        #: Ids of containers for which the last request for the first process failed.
        self._failed: set[str] = set()
        #: Id of a container that the runtime does not list (a pod's sandbox) -> one of its processes.
        self._unlisted: dict[str, Process] = {}

    @property
    def due(self) -> bool:
        now = self._clock()
        period_seconds = EAGER_PERIOD_SECONDS if now < self._eager_until else CALM_PERIOD_SECONDS
        return now - self._polled_at >= period_seconds - _EARLY_SECONDS

    def running(self) -> Sequence[Container]:
        return tuple(container for container in self._table.values() if container.running)

    def pids(self, container: Container) -> tuple[int, ...]:
        """The host's pids of all processes in the container's cgroup and below, ascending; none if the cgroup is gone or unknown. Raises
        CriError if the cgroups can't be read."""
        return self._cgroups.pids(container.cgroup) if container.cgroup is not None else ()

    def wake(self) -> None:
        """Makes `tick` poll once a second for a while, because a container is about to start."""
        self._eager_until = self._clock() + EAGER_SECONDS

    async def tick(self) -> None:
        async with self._polling:
            if self.due:
                await self._refresh()

    async def refresh(self) -> None:
        async with self._polling:
            await self._refresh()

    async def container_of(self, pid: int, start_time: int) -> Container | None:
        """The container of a process (`start_time` in clock ticks since boot); None if the process runs in none of the kubelet's containers
        or is gone. An unknown container causes a poll. Raises CriError if the container is still unknown and the runtime unavailable."""
        process, path = (pid, start_time), self._cgroups.path_of(pid)
        if path is None or not self.runs(process):
            return None
        container, container_id = self._holding(path), container_id_in(path)
        if container is None and container_id is not None and container_id not in self._unlisted:
            await self._poll_for(container_id)
            container = self._holding(path)
            if container is None and self.unavailable is not None:
                raise CriError(self.unavailable)
            if container is None:
                self._unlisted[container_id] = process
        return container

    def _holding(self, path: str) -> Container | None:
        """The listed container with this cgroup or a cgroup above it; without one, the listed container that the path names."""
        running_last = sorted(self._table.values(), key=lambda each: each.running)
        by_cgroup = {each.cgroup: each for each in running_last if each.cgroup is not None}
        at = path
        while at:
            if (container := by_cgroup.get(at)) is not None:
                return container
            at = at.rpartition("/")[0]
        return self._table.get(container_id_in(path) or "")

    async def _poll_for(self, container_id: str) -> None:
        since = self._clock()
        if self.unavailable is not None:
            self.wake()
            return
        async with self._polling:
            # The runtime lists a container before its program runs, so any poll after `since` is new enough.
            if self._polled_at <= since and container_id not in self._table:
                await self._sleep(max(0.0, self._polled_at + UNKNOWN_PERIOD_SECONDS - self._clock()))
                await self._refresh()

    async def _refresh(self) -> None:
        self._polled_at = self._clock()
        before = self._states()
        try:
            await self._update_table(await self._client.list())
        except CriError as error:
            if self.unavailable is None:
                _log.warning("cri_unavailable", reason=str(error))
            self.unavailable = str(error)
        else:
            if self.unavailable is not None:
                _log.info("cri_available")
            self.unavailable, self.listed = None, True
        if self._states() != before:
            self.wake()
        self._unlisted = {name: process for name, process in self._unlisted.items() if self.runs(process)}

    def _states(self) -> set[tuple[str, bool]]:
        return {(container.id, container.running) for container in self._table.values()}

    async def _update_table(self, listed: Sequence[Container]) -> None:
        before = self._table
        self._table = {each.id: _located(each, before.get(each.id)) for each in listed}
        self._failed &= self._table.keys()
        missing = [each for each in self._table.values() if each.running and each.cgroup is None]
        # Failed requests come last, so that one container with a broken status does not delay the others.
        for each in sorted(missing, key=lambda each: each.id in self._failed):
            if not await self._locate(each):
                break

    async def _locate(self, container: Container) -> bool:
        """Requests the container's first process. Returns False if that failed; then other requests wait for the next poll."""
        try:
            first = await self._client.init_process(container.id)
        except CriError as error:
            if container.id not in self._failed:
                _log.warning("container_not_located", container=container.id, pod="/".join(container.pod), reason=str(error))
            self._failed.add(container.id)
            return False
        if first is not None:
            # The first process's cgroup counts if it can be read, because the spec's path is only a request (runc may choose another).
            path = self._cgroups.path_of(first.pid) if first.pid is not None else None
            cgroup = (own_cgroup(path, container.id) if path is not None else None) or first.cgroups_path
            if cgroup is not None:  # else the process may be another container's
                self._table[container.id] = replace(container, pid=first.pid, cgroup=cgroup)
        return True


def _located(listed: Container, before: Container | None) -> Container:
    """Keeps the cgroup that was found before; for a running container also the first process."""
    return replace(listed, pid=before.pid if listed.running else None, cgroup=before.cgroup) if before else listed
