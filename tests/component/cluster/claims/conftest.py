"""The controller in front of the simulated API server, with the objects of Dynamic Resource Allocation and clocks that the test moves."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpumgr.cluster.claims.controller import ClaimsController
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.cluster.scheduler.leader import Leadership, Replica
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.kube.client import ApiServer
from gpumgr.kube.reflector import WatchTimes
from gpumgr.settings.schema import ClaimsSettings, SchedulerSettings
from tests.background import until
from tests.cluster_api import DRA_API, ClusterApiServer
from tests.component.cluster.scheduler.conftest import FAST, Clock, daemons, node

Json = dict[str, Any]
GATE = {"name": "gpumgr.io/quota"}


class DraObjects:
    """Creates and deletes templates beside the simulated API server. `refused`: statuses with which the next creations are answered, with
    `headers`."""

    def __init__(self, sim: ClusterApiServer) -> None:
        self.sim, self._templates = sim, sim.objects("resourceclaimtemplates")
        self.posted: list[str] = []
        self.refused: list[int] = []
        self.headers: dict[str, str] = {}
        path = f"{DRA_API}/namespaces/{{namespace}}/resourceclaimtemplates"
        sim.routes += [web.post(path, self._create), web.delete(f"{path}/{{name}}", self._delete)]

    @property
    def templates(self) -> list[str]:
        return sorted(f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in self._templates.items.values())

    def put(self, kind: str, item: Json) -> None:
        self.sim.objects(kind).put(item)

    def put_dra_node(self, name: str, model: str, memory: str = "40Gi", labels: Mapping[str, str] | None = None) -> None:
        """A node in mode dra with one GPU, and its slice."""
        made = node(name, 0, None)
        made["metadata"]["labels"] = labels or {}
        self.sim.put_node(made)
        device = {"name": "gpu-0", "attributes": {"productName": {"string": model}}, "capacity": {"memory": {"value": memory}}}
        self.put("resourceslices", {"metadata": {"name": name, "uid": name}, "spec": {"nodeName": name, "devices": [device]}})

    async def _create(self, request: web.Request) -> web.Response:
        item = await request.json()
        name = f"{request.match_info['namespace']}/{item['metadata']['name']}"
        self.posted.append(name)
        if self.refused:
            return web.json_response({"message": "no"}, status=self.refused.pop(), headers=self.headers)
        if name in self.templates:
            return web.json_response({"message": "it exists already"}, status=409)
        item["metadata"]["uid"] = f"uid-{name}-{len(self.posted)}"
        self._templates.put(item)
        return web.json_response(item, status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        wanted = (await request.json())["preconditions"]["uid"]
        self._templates.remove(wanted)
        return web.json_response({})


def claim(name: str, cores: int, *, owner: str | None = None, on: str | None = None, template: str = "", uid: str = "") -> Json:
    """A claim of a share with 1 GiB. `on`: allocated on this node's first GPU."""
    amounts = {"cores": str(cores), "memory": "1Gi"}
    request = {"name": "c0", "exactly": {"deviceClassName": "gpu.gpumgr.io", "capacity": {"requests": amounts}}}
    metadata: Json = {"namespace": "team", "name": name, "uid": uid or f"claim-{name}"}
    if owner:
        metadata["ownerReferences"] = [{"kind": "Pod", "uid": f"uid-{owner}"}]
    if template:
        metadata["annotations"] = {"gpumgr.io/claim-template": template}
    made: Json = {"metadata": metadata, "spec": {"devices": {"requests": [request]}}}
    if on:
        result = {"driver": "gpu.gpumgr.io", "pool": on, "device": "gpu-0", "request": "c0", "consumedCapacity": amounts}
        made["status"] = {"allocation": {"devices": {"results": [result]}}}
    return made


def pod(
    name: str, template: str = "", *, claims: Sequence[str] = (), gates: Sequence[Json] = (), created: str = "1", made: str = ""
) -> Json:
    """`template`: of its claim `made`; `claims`: others that exist by themselves."""
    named: list[Json] = [{"name": each, "resourceClaimName": each} for each in claims]
    status: Json = {"phase": "Pending"}
    if template:
        named.append({"name": "gpumgr-vcuda", "resourceClaimTemplateName": template})
    if made:
        status["resourceClaimStatuses"] = [{"name": "gpumgr-vcuda", "resourceClaimName": made}]
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "creationTimestamp": created}
    spec: Json = {"containers": [{"name": "main"}], "resourceClaims": named}
    if gates:
        spec["schedulingGates"] = list(gates)
    return {"metadata": metadata, "spec": spec, "status": status}


def quota(limits: int | str) -> Json:
    """`limits`: the cores of the team, or all of its limits."""
    meta = {"name": "gpuquota", "namespace": "kube-system", "uid": "uid-quota"}
    return {"metadata": meta, "data": {"quota.yaml": f"team: {limits if isinstance(limits, str) else f'[{{cores: {limits}}}]'}"}}


class Stage:
    def __init__(self, dra: DraObjects, watches: ClaimWatches, controller: ClaimsController, clock: Clock) -> None:
        self.sim, self.dra, self.watches, self.controller, self.clock = dra.sim, dra, watches, controller, clock

    def gated(self, name: str) -> bool:
        return GATE in self.sim._pods.items[f"uid-{name}"]["spec"].get("schedulingGates", [])

    def events(self, name: str) -> list[str]:
        found = self.sim.written.events.values()
        return [f"{each['reason']}: {each['message']}" for each in found if each["involvedObject"]["name"] == name]

    def gated_pod(self, name: str, cores: int, created: str = "1") -> None:
        """With its claim, as kube-controller-manager makes it."""
        self.sim.put_document(pod(name, f"vcuda-c0-{cores}-4", gates=[GATE], created=created, made=f"{name}-claim"))
        self.dra.put("resourceclaims", claim(f"{name}-claim", cores, owner=name))

    async def opened(self, name: str) -> None:
        """Until the pod has no gate."""
        await until(lambda: not self.gated(name))

    async def admit(self, name: str, cores: int, created: str = "1") -> None:
        self.gated_pod(name, cores, created)
        await self.opened(name)

    async def held_back(self, name: str, reason: str = "") -> None:
        """Until an event has the reason for which the pod keeps its gate."""
        await until(lambda: bool(self.events(name)) or not self.gated(name))
        assert self.gated(name)
        assert reason in self.events(name)[0]

    def bind(self, name: str, cores: int, node: str = "a") -> None:
        """What kube-scheduler does."""
        self.dra.put("resourceclaims", claim(f"{name}-claim", cores, owner=name, on=node))
        bound = {**self.sim._pods.items[f"uid-{name}"]}
        bound["spec"] = {**bound["spec"], "nodeName": node}
        self.sim.put_document(bound)


@asynccontextmanager
async def running(
    dra: DraObjects,
    folder: Path,
    settings: ClaimsSettings | None = None,
    *,
    replica: Replica | None = None,
    times: LeaseTimes | None = None,
    clock: Clock | None = None,
    watch_times: WatchTimes = FAST,
) -> AsyncIterator[Stage]:
    """With `replica` it takes part in the election of a leader."""
    clock = clock or Clock()
    server = await ApiServer.connect(dra.sim.kubeconfig(folder / "kubeconfig"), clock=lambda: clock.now)
    watches = ClaimWatches(server, SchedulerSettings(), watch_times=watch_times, clock=lambda: clock.now)
    leadership = Leadership(server, replica, watches.refresh, times=times, clock=lambda: clock.now) if replica else None
    controller = ClaimsController(
        server,
        watches,
        settings or ClaimsSettings(),
        "host",
        leader=leadership,
        clock=lambda: clock.now,
        jitter=lambda: 0.5,
        period_seconds=0.01,
    )
    async with daemons(server, leadership, watches, controller):
        await until(lambda: watches.synced)
        yield Stage(dra, watches, controller, clock)


@pytest.fixture
async def dra() -> AsyncIterator[DraObjects]:
    objects = DraObjects(ClusterApiServer("a"))
    async with objects.sim:
        yield objects


@pytest.fixture
async def stage(dra: DraObjects, tmp_path: Path) -> AsyncIterator[Stage]:
    async with running(dra, tmp_path) as made:
        yield made
