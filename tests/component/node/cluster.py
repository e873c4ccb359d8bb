"""A node and its API server: the agent with its kubelet in memory, and the real publisher in front of the stand-in API server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from gpumgr.agent.history import History
from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.decisions import DecisionReporter
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.kube.reflector import WatchTimes
from gpumgr.ledger.history import HistoryEntry
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import Document
from gpumgr.sim.kubelet_pods import PodStatus, SimPod
from tests.component.stage.stage import HAMI
from tests.unit.agent.world import World

_PACE = WatchTimes(pause_seconds=(0.005, 0.01))


class Cluster:
    """`look` advances the clock and reports once; the reporter's daemon does not run."""

    def __init__(self, world: World, api: SimApiServer, server: ApiServer, *, written: bool = True) -> None:
        self.world, self.api = world, api
        self.cache, self.publisher = (
            PodCache(server, api.node_name, watch_times=_PACE, resources=HAMI),
            Publisher(server, api.node_name),
        )
        self.daemons: list[asyncio.Task[NoReturn]] = []
        self._written = written
        self.decisions = self.reporter()

    def reporter(self) -> DecisionReporter:
        """As at the start of an agent."""
        made = DecisionReporter(
            self.publisher,
            agent_state=self.world.agent_state,
            pods=self.cache,
            node=self.api.node_name,
            clock=self.world.clock,
        )
        made.switch(annotate_pods=self._written, write_events=self._written)
        return made

    @property
    def history(self) -> History:
        return self.world.agent_state.history

    async def shown(self, pod: SimPod, status: PodStatus | None = None) -> SimPod:
        """The API server has the pod, and the cache too."""
        status = status or PodStatus(phase="Pending")
        self.api.put(pod, status)
        await self.until(lambda: getattr(self.cache.by_uid(pod.uid), "phase", None) == status.phase)
        return pod

    async def run(self, pod: SimPod) -> SimPod:
        return await self.world.run(await self.shown(pod))

    async def look(self, seconds: float = 1.0) -> None:
        """Until what is due then is written."""
        self.decisions.report()
        self.world.clock.now += seconds
        self.decisions.report()
        await self.written()

    async def written(self) -> None:
        await self.until(lambda: self.publisher.state().waiting == 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert not any(daemon.done() for daemon in self.daemons), self.daemons
                await asyncio.sleep(0.002)

    def add(self, **entry: Any) -> None:
        self.history.add(HistoryEntry(at=1.0, **entry))

    @property
    def writes(self) -> list[str]:
        return [request for request in self.api.requests if request not in ("list", "watch")]

    @property
    def events(self) -> list[Document]:
        return list(self.api.written.events.values())

    def annotations(self, pod: SimPod) -> Mapping[str, str]:
        return self.api.annotations(pod.uid)

    def allocations(self, pod: SimPod) -> list[dict[str, Any]]:
        """The containers in the pod's annotation."""
        result: list[dict[str, Any]] = json.loads(self.annotations(pod)["gpumgr.io/allocations"])
        return result


@asynccontextmanager
async def announced(world: World, folder: Path, *, written: bool = True) -> AsyncIterator[Cluster]:
    """The pod cache and the publisher run. `written`: annotations and events of pods are written."""
    async with SimApiServer("node-1") as api:
        server = await ApiServer.connect(api.kubeconfig(folder / "kubeconfig"))
        cluster = Cluster(world, api, server, written=written)
        cluster.daemons += [asyncio.create_task(cluster.cache.run()), asyncio.create_task(cluster.publisher.run())]
        try:
            await cluster.cache.wait_synced()
            yield cluster
        finally:
            for daemon in cluster.daemons:
                daemon.cancel()
            await asyncio.wait(cluster.daemons)
            await server.close()
