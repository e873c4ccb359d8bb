"""The API server's side as the agent starts it: the publisher with the history, and a bug in a reporter."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from gpumgr.driver import Hardware
from gpumgr.enforcement.mps.grace_periods import ClientsOfPods
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.tables import Loaded
from gpumgr.node import api_side, lifecycle
from gpumgr.node.api_side import ApiSide
from gpumgr.node.components import Components
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.placement.pods import PodView
from gpumgr.settings import Settings
from gpumgr.settings.schema import (
    CheckpointSettings,
    ContainerSettings,
    CriSettings,
    EnforcementSettings,
    KubernetesSettings,
    NodeSettings,
)
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod
from tests.background import background, until
from tests.cluster_api import ClusterApiServer
from tests.component.stage.stage import MemoryCheckpoint

POD = SimPod(namespace="team", name="web", uid="uid-1", containers=(SimContainer(name="main", cores=30, memory_blocks=4),))


@asynccontextmanager
async def started(
    sim: ClusterApiServer,
    folder: Path,
    *,
    pods_known: bool = False,
    profile: Literal["tencent", "both"] = "tencent",
    delete_failed: bool = False,
) -> AsyncIterator[tuple[ApiSide, Components]]:
    """Only its daemons run. `pods_known`: the pods are listed before, as they are before a takeover from another agent."""
    settings = Settings(
        node=NodeSettings(name="node-1", profile=profile),
        kubernetes=KubernetesSettings(kubeconfig=sim.kubeconfig(folder / "kubeconfig"), delete_failed_pods=delete_failed),
        checkpoint=CheckpointSettings(dir=folder),
        container=ContainerSettings(allocation_dir=folder / "vm"),
        cri=CriSettings(socket=folder / "none.sock"),
        enforcement=EnforcementSettings(backend="none", run_dir=folder / "run"),
    )
    checkpoint = MemoryCheckpoint()
    async with ApiSide.open(settings) as side:
        if pods_known:
            side.watch()
            await side.wait_synced(60)
        hardware = Hardware(simulated=True)
        enforcement = NodeEnforcement(settings, hardware, side.pods, side.publisher)
        components = Components(
            settings, hardware, loaded=Loaded(), checkpoint=checkpoint, api_side=side, driver=None, enforcement=enforcement
        )
        async with asyncio.TaskGroup() as group:
            daemons = side.start(group, components)
            yield side, components
            assert not any(daemon.done() for daemon in daemons), daemons
            for daemon in daemons:
                daemon.cancel()
        await components.close()


async def test_the_limits_of_each_pod_that_appears_are_looked_at_once(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(api_side, "report_two_limits", lambda _state, pod: seen.put_nowait(pod.name))
    sim.put(POD)
    async with started(sim, tmp_path), asyncio.timeout(30):
        assert await seen.get() == "web"
        sim.put(POD, PodStatus(phase="Running"))
        sim.put(replace(POD, name="later", uid="uid-2"))
        assert await seen.get() == "later"


async def test_pods_that_can_not_be_read_get_events_as_the_settings_in_force_say(sim: ClusterApiServer, tmp_path: Path) -> None:
    def unreadable(name: str) -> dict[str, Any]:
        item = refused(name)
        return {**item, "spec": {**item["spec"], "containers": [{}]}}

    async with started(sim, tmp_path) as (side, _), asyncio.timeout(30):
        for number, (name, write_events) in enumerate((("a", True), ("b", False), ("c", True)), start=1):
            side.apply(KubernetesSettings(write_events=write_events, describe_node=False))
            sim.put_document(unreadable(name))
            await until(lambda number=number: getattr(side.pods, "unreadable", 0) == number)  # type: ignore[misc]
        await until(lambda: len(sim.written.events) == 2)
    assert sorted(each["involvedObject"]["name"] for each in sim.written.events.values()) == ["a", "c"]


@pytest.mark.parametrize("delete_failed", [False, True])
async def test_pods_that_the_agent_refused_are_deleted_only_if_configured(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delete_failed: bool
) -> None:
    """The first one failed before the agent started."""
    asked: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(Publisher, "delete_pod", lambda _self, pod, _uid: asked.put_nowait(pod[1]))
    seen: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(api_side, "report_two_limits", lambda _state, pod: seen.put_nowait(pod.name))
    sim.put_document(refused("a"))
    async with started(sim, tmp_path, delete_failed=delete_failed), asyncio.timeout(30):
        assert await seen.get() == "a"
        item = refused("b")
        sim.put_document({**item, "status": {"phase": "Pending"}})
        assert await seen.get() == "b"
        sim.put_document(item)
        sim.put_document({**item, "metadata": {**item["metadata"], "annotations": {"changed": "once more"}}})
        sim.put_document(refused("c"))
        assert await seen.get() == "c"
    assert [asked.get_nowait() for _ in range(asked.qsize())] == (["a", "b", "c"] if delete_failed else [])


def failed(name: str, limits: Mapping[str, str], **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": name, "uid": name, **metadata},
        "spec": {"nodeName": "node-1", "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError"},
    }


def refused(name: str) -> dict[str, Any]:
    owners = [{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}]
    return failed(name, {"tencent.com/vcuda-core": "150"}, ownerReferences=owners)


@pytest.mark.parametrize("pods_known", [False, True])
async def test_every_listener_learns_of_the_pods_that_are_known_before_the_start(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods_known: bool
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def end_clients(_: ClientsOfPods, pods: Collection[PodView]) -> None:
        for pod in pods:
            ended.put_nowait(pod.name)

    monkeypatch.setattr(ClientsOfPods, "end", end_clients)
    sim.written.annotations["hami.io/mutex.lock"] = "2026-01-01T00:00:00Z,team,h"
    annotations = {
        "hami.io/vgpu-node": "node-1",
        "hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,1000,0:;",
        "hami.io/bind-phase": "allocating",
    }
    grace = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}  # nearly over
    sim.put_document(failed("h", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}, annotations=annotations, **grace))
    async with started(sim, tmp_path, pods_known=pods_known, profile="both"), asyncio.timeout(30):
        assert await ended.get() == "h"
        await until(lambda: "hami.io/mutex.lock" not in sim.written.annotations)
        await until(lambda: sim.annotations("h")["hami.io/bind-phase"] == "failed")


async def test_the_pods_on_drained_gpus_are_looked_up_again_and_again(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may become known after the drain."""
    looks = asyncio.Queue[None]()
    monkeypatch.setattr(lifecycle, "EVICT_SECONDS", 0.0)
    async with started(sim, tmp_path) as (side, components), asyncio.timeout(30):

        async def look() -> None:
            looks.put_nowait(None)

        monkeypatch.setattr(components.maintenance, "evict_again", look)
        async with background(lifecycle._evict_again(side, components.maintenance)):
            for _ in range(2):
                await looks.get()
