"""The extender's server in front of the simulated API server, with a clock that the test moves."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec import UNSET

from gpumgr.cluster.claims.controller import ClaimsController
from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.scheduler.extender import Extender
from gpumgr.cluster.scheduler.leader import Leadership, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.cluster.scheduler.objects import parse_node
from gpumgr.cluster.scheduler.pages import ClusterPages, application_of, page_server
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.kube.client import ApiServer
from gpumgr.kube.cluster_annotations import INVENTORY_ANNOTATION, Inventory, InventoryGpu, encode
from gpumgr.kube.reflector import WatchTimes
from gpumgr.placement.devices import score_matrix
from gpumgr.placement.requests import ContainerKind
from gpumgr.settings import Settings
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import HttpSettings, SchedulerSettings
from gpumgr.web.access import Origin
from gpumgr.web.http_server import HttpServer, PageServer
from tests.background import until
from tests.cluster_api import ClusterApiServer
from tests.cluster_states import expect
from tests.topologies import topology_from_matrix

FAST = WatchTimes(pause_seconds=(0.005, 0.02), watch_seconds=(60, 60))
GPU_MEBIBYTES = 16384
Json = dict[str, Any]


def inventory(name: str, count: int, *, model: str = "", indices: Sequence[int] = (), **more: Any) -> str:
    """`indices`: NVML's, if they are not the positions."""
    rows = [["X" if a == b else "SYS" for b in range(count)] for a in range(count)]
    gpus = tuple(
        InventoryGpu(uuid=f"GPU-{name}-{gpu}", model=model, memory=GPU_MEBIBYTES, index=indices[gpu] if indices else UNSET)
        for gpu in range(count)
    )
    return encode(
        Inventory(**{"topology_manager": "none", "gpus": gpus, "levels": score_matrix(topology_from_matrix(rows)), **more})
    )


def node(name: str, count: int, text: str | None) -> Json:
    """`text` is its inventory; None: it has none."""
    capacity = {"tencent.com/vcuda-core": str(100 * count), "tencent.com/vcuda-memory": str(64 * count)}
    annotations = {} if text is None else {INVENTORY_ANNOTATION: text}
    return {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": annotations}, "status": {"capacity": capacity}}


def pod(
    name: str,
    *containers: tuple[ContainerKind, int | str, int | str],
    on: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Json:
    made: dict[str, list[Json]] = {"initContainers": [], "containers": []}
    for place, (kind, cores, blocks) in enumerate(containers):
        limits = {"tencent.com/vcuda-core": str(cores), "tencent.com/vcuda-memory": str(blocks)}
        container: Json = {"name": f"c{place}", "resources": {"limits": limits}}
        if kind == "sidecar":
            container["restartPolicy"] = "Always"
        made["containers" if kind == "app" else "initContainers"].append(container)
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "annotations": dict(annotations or {})}
    return {"metadata": metadata, "spec": {**made, **({"nodeName": on} if on else {})}, "status": {"phase": "Pending"}}


@dataclass
class Clock:
    now: float = 0.0


@dataclass(kw_only=True)
class Stage:
    """`url` is that of the verbs, `pages_url` that of the pages."""

    sim: ClusterApiServer
    server: ApiServer
    extender: Extender
    index: ClusterIndex
    quotas: Quotas
    watches: ClusterWatches
    clock: Clock
    leadership: Leadership | None
    pages: ClusterPages
    url: str
    pages_url: str
    http: ClientSession

    async def post(self, verb: str, body: bytes | str) -> Any:
        async with self.http.post(
            f"{self.url}/scheduler/{verb}", data=io.BytesIO(body.encode() if isinstance(body, str) else body)
        ) as answer:
            assert answer.status == 200
            return await answer.json()

    async def ready(self) -> list[int]:
        """The statuses of both probes."""
        found = []
        for url in (self.url, self.pages_url):
            async with self.http.get(f"{url}/readyz") as answer:
                found.append(answer.status)
        return found

    async def page(self, path: str) -> tuple[int, Any]:
        """The status and the text or JSON of a page."""
        async with self.http.get(f"{self.pages_url}{path}") as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def filter(self, item: Json, names: Sequence[str] = ("a", "b")) -> Json:
        answer: Json = await self.post("filter", json.dumps({"Pod": item, "Nodes": None, "NodeNames": list(names)}))
        return answer

    async def filtered(self, item: Json, names: Sequence[str] = ("a", "b")) -> list[str]:
        """The names of the nodes that `filter` has answered."""
        found: list[str] = (await self.filter(item, names))["NodeNames"]
        return found

    async def bind(self, item: Json, name: str) -> str:
        meta = item["metadata"]
        body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": name}
        answer: Json = await self.post("bind", json.dumps(body))
        return str(answer["Error"])

    async def create(self, item: Json) -> Json:
        self.sim.put_document(item)
        return item

    async def show(self, *items: Json) -> None:
        """Creates or replaces the pods; the watch has shown them, and all changes of pods before."""
        marker = pod("marker", ("app", 1, 1))
        for each in (*items, marker):
            self.sim.put_document(each)
        await until(lambda: "uid-marker" in self.watches.pending)
        self.sim.remove("uid-marker")
        await until(lambda: "uid-marker" not in self.watches.pending)

    async def end(self, name: str) -> None:
        """Deletes the pod; the watch has shown that."""
        self.sim.remove(f"uid-{name}")
        await self.show()

    async def show_nodes(self, *items: Json) -> None:
        """Creates or replaces the nodes; the watch has shown them."""
        for each in items:
            self.sim.put_node(each)
        nodes = [parse_node(each, self.watches._labels, self.watches._hami) for each in items]
        await until(lambda: all(self.watches.nodes.get(each.state.name) == each for each in nodes))

    async def schedule(self, item: Json, names: Sequence[str] = ("a", "b")) -> str | None:
        """What kube-scheduler does with a pod: its node, None if it was rejected. The watch has shown the binding."""
        await self.create(item)
        found = await self.filtered(item, names)
        if not found:
            return None
        assert await self.bind(item, found[0]) == ""
        uid = item["metadata"]["uid"]
        await until(lambda: self.index.placement(uid) is not None and uid not in self.index.assumed)
        return found[0]

    def limit(self, **limit: Any) -> None:
        """The only limit of the pods' namespace."""
        self.quotas.limits = {"team": NamespaceQuota(limits=(Limit(**limit),))}

    def state(self, name: str) -> NodeState:
        return expect(NodeState, self.index.node(name))

    def cores(self, name: str) -> list[int]:
        return [used.cores for used in self.index.used(name)]


class HeldBindings:
    """Each binding waits at the API server until `released`, before it happens. `held`: how many have begun to wait."""

    def __init__(self, sim: ClusterApiServer) -> None:
        self.held, self.released = 0, asyncio.Event()
        sim.bind_hook = self._hold

    async def _hold(self, happened: bool) -> None:
        if not happened:
            self.held += 1
            await self.released.wait()


@asynccontextmanager
async def daemons(
    server: ApiServer, leadership: Leadership | None, *others: ClusterWatches | ClaimsController
) -> AsyncIterator[None]:
    """Runs them until the end of the block; then gives the Lease up and closes the connections."""
    tasks = [asyncio.create_task(each.run()) for each in (*others, leadership) if each is not None]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled(), task.exception()
        if leadership is not None:
            await leadership.release()
        await server.close()


@asynccontextmanager
async def running(
    sim: ClusterApiServer,
    folder: Path,
    settings: SchedulerSettings | None = None,
    *,
    replica: Replica | None = None,
    times: LeaseTimes | None = None,
    clock: Clock | None = None,
    hami: ReplicaResources | None = None,
    watch_times: WatchTimes = FAST,
) -> AsyncIterator[Stage]:
    """With `replica` it takes part in the election of a leader."""
    clock, settings = clock or Clock(), settings or SchedulerSettings()
    server = await ApiServer.connect(sim.kubeconfig(folder / "kubeconfig"), clock=lambda: clock.now)
    watches = ClusterWatches(server, settings, hami=hami, watch_times=watch_times, clock=lambda: clock.now)
    leadership = Leadership(server, replica, watches.refresh, times=times, clock=lambda: clock.now) if replica else None
    extender = Extender(server, watches, settings, leadership=leadership, clock=lambda: clock.now)
    pages = ClusterPages(server, watches, settings.policy)
    application = make_application(
        extender, max_request_mebibytes=settings.max_request_mebibytes, answered=pages.metrics.answered
    )
    listener = HttpServer(application, host="127.0.0.1", port=0)
    shown = page_server(pages.routes(), watches, Settings(http=HttpSettings(address="127.0.0.1")), 0)
    async with daemons(server, leadership, watches), ClientSession() as session:
        for each in (listener, shown):
            await each.start()
        await until(lambda: watches.synced)
        yield Stage(
            sim=sim,
            server=server,
            extender=extender,
            index=watches.index,
            quotas=watches.quotas,
            watches=watches,
            clock=clock,
            leadership=leadership,
            pages=pages,
            url=listener.url,
            pages_url=shown.url,
            http=session,
        )
    for each in (listener, shown):
        await each.stop()


@asynccontextmanager
async def serving(stage: Stage, origin: Origin, **options: Any) -> AsyncIterator[str]:
    """The URL of its pages for clients of this origin. `options`: settings of the section http."""
    application = partial(application_of, stage.pages.routes(), stage.watches, origin_of=lambda *_: origin)
    server = PageServer(application, HttpSettings(port=0, **options))
    await server.start()
    yield server.url
    await server.stop()


@pytest.fixture
async def sim() -> AsyncIterator[ClusterApiServer]:
    """Node a has two GPUs, node b four."""
    async with ClusterApiServer("a") as server:
        server.put_node(node("a", 2, inventory("a", 2)))
        server.put_node(node("b", 4, inventory("b", 4)))
        yield server


@pytest.fixture
async def stage(sim: ClusterApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with running(sim, tmp_path) as made:
        yield made


@pytest.fixture
async def soft(sim: ClusterApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """Answers with up to three nodes, and takes requests of up to 1 MiB."""
    async with running(sim, tmp_path, SchedulerSettings(candidates=3, max_request_mebibytes=1)) as made:
        yield made
