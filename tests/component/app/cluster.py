"""A node that is announced: the agent with its kubelet in memory, and the real writer before the stand-in API server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from gpumgr.agent.history import History
from gpumgr.allocator.history import Entry
from gpumgr.app.announcing import Announcing
from gpumgr.kubeapi.cache import PodCache
from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.reflector import Pace
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_written import Document
from gpumgr.sim.kubelet_pods import PodStatus, SimPod
from tests.unit.agent.world import World

_PACE = Pace(pause_seconds=(0.005, 0.01))


class Cluster:
    """`look` moves time on and lets the announcing look; its daemon does not run. `timing`: what the writer has for a clock."""

    def __init__(
        self, world: World, api: SimApiServer, server: ApiServer, timing: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        self.world, self.api = world, api
        self.cache, self.announcer = PodCache(server, api.node_name, pace=_PACE), Announcer(server, api.node_name, **timing or {})
        self.daemons: list[asyncio.Task[NoReturn]] = []
        self.described = 0
        self.settings = settings
        self.announcing = self.announce()

    def announce(self) -> Announcing:
        """As at the start of an agent."""
        return Announcing(
            self.announcer,
            books=self.world.books,
            pods=self.cache,
            describe=self._describe,
            node=self.api.node_name,
            clock=self.world.clock,
            **self.settings,
        )

    def _describe(self) -> None:
        self.described += 1

    @property
    def history(self) -> History:
        return self.world.books.history

    async def shown(self, pod: SimPod, status: PodStatus | None = None) -> SimPod:
        """The API server has the pod, and the cache knows."""
        status = status or PodStatus(phase="Pending")
        self.api.put(pod, status)
        await self.until(lambda: getattr(self.cache.by_uid(pod.uid), "phase", None) == status.phase)
        return pod

    async def run(self, pod: SimPod) -> SimPod:
        return await self.world.run(await self.shown(pod))

    async def look(self, seconds: float = 1.0) -> None:
        """Until all that is then to be said is written."""
        self.world.clock.now += seconds
        self.announcing.look()
        await self.written()

    async def written(self) -> None:
        await self.until(lambda: self.announcer.state().waiting == 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not any(daemon.done() for daemon in self.daemons), self.daemons
                await asyncio.sleep(0.002)

    def tell(self, **entry: Any) -> None:
        self.history.add(Entry(at=1.0, **entry))

    @property
    def writes(self) -> list[str]:
        return [request for request in self.api.requests if request not in ("list", "watch")]

    @property
    def events(self) -> list[Document]:
        return list(self.api.written.events.values())

    def annotations(self, pod: SimPod) -> Mapping[str, str]:
        return self.api.annotations(pod.uid)

    def allocations(self, pod: SimPod) -> list[dict[str, Any]]:
        """What the pod's annotation lists."""
        result: list[dict[str, Any]] = json.loads(self.annotations(pod)["gpumgr.io/allocations"])
        return result


@asynccontextmanager
async def announced(world: World, folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Both daemons of the API server's side run."""
    async with SimApiServer("node-1") as api:
        server = await ApiServer.connect(api.kubeconfig(folder / "kubeconfig"))
        cluster = Cluster(world, api, server, **settings)
        cluster.daemons += [asyncio.create_task(cluster.cache.run()), asyncio.create_task(cluster.announcer.run())]
        try:
            await cluster.cache.wait_synced()
            yield cluster
        finally:
            for daemon in cluster.daemons:
                daemon.cancel()
            await asyncio.wait(cluster.daemons)
            await server.close()
