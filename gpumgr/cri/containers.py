"""The node's containers and whose process is whose, out of memory; the runtime is asked no more often than needed.

The kernel's word counts: a process belongs to the container that its cgroup names. The runtime adds the names of pod and container.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from gpumgr.agent.ports import Runs
from gpumgr.allocator.quarantine import Process
from gpumgr.cri.cgroups import Cgroups
from gpumgr.cri.client import CriClient
from gpumgr.cri.codec import FirstProcess
from gpumgr.cri.pace import EAGER_PERIOD_SECONDS, Pace
from gpumgr.cri.place import Place, path_of
from gpumgr.errors import CriError
from gpumgr.usage.containers import Container

_log = structlog.get_logger(__name__)

#: pid and cgroup, asked of the runtime once for each container.
Location = tuple[int | None, str | None]


class Containers:
    """Call `tick` once a second or more often. Nothing here raises because the runtime is away: `unavailable` says why, and what
    was known stays known. `runs` tells whether a process still lives; `clock` is monotonic, in seconds, and `sleep` waits for it."""

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
        self._runs = runs
        self._clock = clock
        self._sleep = sleep
        self._pace = Pace()
        self._asking = asyncio.Lock()
        self._unavailable: str | None = None
        self._table: dict[str, Container] = {}
        #: None: it was asked for in vain, which was said, and will be asked for again.
        self._locations: dict[str, Location | None] = {}
        self._processes: dict[Process, Place] = {}
        #: Ids of cgroups like containers' that the runtime does not list: the pods' sandboxes.
        self._unlisted: set[str] = set()

    @property
    def unavailable(self) -> str | None:
        """Why the runtime does not answer; None while it does (or was not asked yet)."""
        return self._unavailable

    def running(self) -> Sequence[Container]:
        """The containers that ran when the runtime was last asked."""
        return tuple(container for container in self._table.values() if container.running)

    def pids(self, container: Container) -> tuple[int, ...]:
        """The host's pids of all processes in the container's cgroup and below, now, ascending; none if its cgroup is gone or
        not known. Raises CriError if the cgroups can't be read."""
        return self._cgroups.pids(container.cgroup) if container.cgroup is not None else ()

    def wake(self) -> None:
        """A container is about to start: the runtime is asked each second for a while."""
        self._pace.wake(self._clock())

    async def tick(self) -> None:
        """Asks the runtime if it is time to."""
        async with self._asking:
            if self._pace.due(self._clock()):
                await self._refresh()

    async def refresh(self) -> None:
        """Asks the runtime now."""
        async with self._asking:
            await self._refresh()

    async def of_process(self, pid: int, start_time: int) -> Container | None:
        """The container of a process (`start_time` in clock ticks since boot); None if it runs in none of the kubelet's containers or
        is gone. An unknown container is asked for, at most once a second; a process that meets that limit waits for its turn.

        While the runtime is away, an unknown container comes without names: `pod` is ("", ""), `name` is "", the rest is true.
        """
        process = (pid, start_time)
        place = self._processes.get(process) or self._cgroups.place_of(pid)
        if place is None or not self._runs(process):
            return None
        self._processes[process] = place
        container = self._table.get(place.container_id)
        if container is not None or place.container_id in self._unlisted:
            return container
        await self._look_for(place.container_id)
        container = self._table.get(place.container_id)
        if container is None and self._unavailable is not None:
            return Container(id=place.container_id, pod=("", ""), pod_uid=place.pod_uid, name="", cgroup=place.cgroup)
        if container is None:
            self._unlisted.add(place.container_id)
        return container

    async def _look_for(self, container_id: str) -> None:
        """Asks for a container that is not in the table, unless the runtime is known to be away."""
        since = self._clock()
        if self._unavailable is not None:
            self.wake()
            return
        async with self._asking:
            # Whoever asked after `since` has asked for this one too: a container is listed before its own program runs.
            if self._pace.asked <= since and container_id not in self._table:
                await self._sleep(max(0.0, self._pace.asked + EAGER_PERIOD_SECONDS - self._clock()))
                await self._refresh()

    async def _refresh(self) -> None:
        self._pace.ask(self._clock())
        before = self._states()
        try:
            await self._take(await self._client.list())
        except CriError as error:
            if self._unavailable is None:
                _log.warning("cri_unavailable", reason=str(error))
            self._unavailable = str(error)
        else:
            if self._unavailable is not None:
                _log.info("cri_available")
            self._unavailable = None
        if self._states() != before:
            self.wake()
        self._forget()

    def _states(self) -> set[tuple[str, bool]]:
        return {(container.id, container.running) for container in self._table.values()}

    def _forget(self) -> None:
        """Drops what concerns processes that are gone."""
        self._processes = {process: place for process, place in self._processes.items() if self._runs(process)}
        self._unlisted &= {place.container_id for place in self._processes.values()}

    async def _take(self, listed: Sequence[Container]) -> None:
        """Names at once, then the locations of those that run and have none yet."""
        self._locations = {each.id: self._locations[each.id] for each in listed if each.id in self._locations}
        self._table = {each.id: self._located(each) for each in listed}
        missing = [each for each in listed if each.running and self._locations.get(each.id) is None]
        # What failed before comes last, so that one container that the runtime can't tell of is in nobody's way.
        for each in sorted(missing, key=lambda each: each.id in self._locations):
            if not await self._locate(each):
                break

    async def _locate(self, container: Container) -> bool:
        """Asks where a container runs. False: there was no answer, and the next question can wait."""
        try:
            first = await self._client.first_process(container.id)
        except CriError as error:
            if container.id not in self._locations:
                _log.warning("container_not_located", container=container.id, pod="/".join(container.pod), reason=str(error))
            self._locations[container.id] = None
            return False
        if first is not None:
            self._locations[container.id] = self._location(container.id, first)
            self._table[container.id] = self._located(container)
        return True

    def _located(self, container: Container) -> Container:
        pid, cgroup = self._locations.get(container.id) or (None, None)
        return replace(container, pid=pid if container.running else None, cgroup=cgroup)

    def _location(self, container_id: str, first: FirstProcess) -> Location:
        """Where its first process is in truth; the spec's path is only what was asked for (runc may have put it elsewhere)."""
        place = self._cgroups.place_of(first.pid) if first.pid is not None else None
        if place is not None and place.container_id == container_id:
            return first.pid, place.cgroup
        return first.pid, path_of(first.cgroups_path) if first.cgroups_path is not None else None
