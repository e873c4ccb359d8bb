"""The extender's server in front of the simulated API server, with a clock that the test moves."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec import UNSET

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.scheduler.extender import Extender
from gpumgr.cluster.scheduler.leader import Leadership, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.cluster.scheduler.pages import ClusterPages
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.kube.client import ApiServer
from gpumgr.kube.cluster_annotations import INVENTORY_ANNOTATION, Inventory, InventoryGpu, encode
from gpumgr.kube.reflector import WatchTimes
from gpumgr.placement.devices import score_matrix
from gpumgr.placement.requests import ContainerKind
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import SchedulerSettings
from gpumgr.web.http_server import HttpServer
from tests.background import until
from tests.cluster_api import ClusterApiServer
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
    """`url` is that of the verbs."""

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
    http: ClientSession

    async def post(self, verb: str, body: bytes | str) -> Any:
        async with self.http.post(
            f"{self.url}/scheduler/{verb}", data=io.BytesIO(body.encode() if isinstance(body, str) else body)
        ) as answer:
            assert answer.status == 200
            return await answer.json()

    async def get(self, path: str) -> int:
        async with self.http.get(f"{self.url}{path}") as answer:
            return answer.status

    async def filter(self, item: Json, names: Sequence[str] = ("a", "b")) -> Json:
        answer: Json = await self.post("filter", json.dumps({"Pod": item, "Nodes": None, "NodeNames": list(names)}))
        return answer

    async def bind(self, item: Json, name: str) -> str:
        meta = item["metadata"]
        body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": name}
        answer: Json = await self.post("bind", json.dumps(body))
        return str(answer["Error"])

    async def create(self, item: Json) -> Json:
        self.sim.put_document(item)
        return item

    async def schedule(self, item: Json, names: Sequence[str] = ("a", "b")) -> str | None:
        """What kube-scheduler does with a pod: its node, None if it was rejected. The watch has shown the binding."""
        await self.create(item)
        found = (await self.filter(item, names))["NodeNames"]
        if not found:
            return None
        assert await self.bind(item, found[0]) == ""
        uid = item["metadata"]["uid"]
        await until(lambda: self.index.placement(uid) is not None and uid not in self.index.assumed)
        return str(found[0])

    def cores(self, name: str) -> list[int]:
        return [used.cores for used in self.index.used(name)]


@asynccontextmanager
async def running(
    sim: ClusterApiServer,
    folder: Path,
    settings: SchedulerSettings,
    *,
    replica: Replica | None = None,
    times: LeaseTimes | None = None,
    clock: Clock | None = None,
    hami: ReplicaResources | None = None,
    watch_times: WatchTimes = FAST,
) -> AsyncIterator[Stage]:
    """With `replica` it takes part in the election of a leader."""
    clock = clock or Clock()
    server = await ApiServer.connect(sim.kubeconfig(folder / "kubeconfig"), clock=lambda: clock.now)
    watches = ClusterWatches(server, settings, hami=hami, watch_times=watch_times, clock=lambda: clock.now)
    leadership = Leadership(server, replica, watches.refresh, times=times, clock=lambda: clock.now) if replica else None
    extender = Extender(server, watches, settings, leadership=leadership, clock=lambda: clock.now)
    pages = ClusterPages(server, watches, settings.policy)
    application = make_application(
        extender, max_request_mebibytes=settings.max_request_mebibytes, answered=pages.metrics.answered
    )
    listener = HttpServer(application, host="127.0.0.1", port=0)
    await listener.start()
    tasks = [asyncio.create_task(each.run()) for each in (watches, leadership) if each is not None]
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{listener.address[1]}"
        stage = Stage(
            sim=sim,
            server=server,
            extender=extender,
            index=watches.index,
            quotas=watches.quotas,
            watches=watches,
            clock=clock,
            leadership=leadership,
            pages=pages,
            url=url,
            http=session,
        )
        try:
            await until(lambda: watches.synced)
            yield stage
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if leadership is not None:
                await leadership.release()
    await listener.stop()
    await server.close()


@pytest.fixture
async def sim() -> AsyncIterator[ClusterApiServer]:
    """Node a has two GPUs, node b four."""
    async with ClusterApiServer("a") as server:
        server.put_node(node("a", 2, inventory("a", 2)))
        server.put_node(node("b", 4, inventory("b", 4)))
        yield server


@pytest.fixture
async def stage(sim: ClusterApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with running(sim, tmp_path, SchedulerSettings()) as made:
        yield made


@pytest.fixture
async def soft(sim: ClusterApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """Answers with up to three nodes, and takes requests of up to 1 MiB."""
    async with running(sim, tmp_path, SchedulerSettings(candidates=3, max_request_mebibytes=1)) as made:
        yield made
