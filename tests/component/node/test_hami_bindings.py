"""Pods that HAMi's scheduler binds: its lock of the node goes, and it learns the result, however the admission of the pod ends."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.units import Amounts
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import PodKey
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World

from .cluster import Cluster, announced

UUID, NAME = snapshot(2).gpus[0].uuid, "00000000"
LOCK, PHASE = "hami.io/mutex.lock", "hami.io/bind-phase"
KEY: PodKey = ("team", "h")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with announced(await World.made(snapshot(2)), tmp_path) as made:
        made.api.written.annotations[LOCK] = "2026-01-01T00:00:00Z,team,h"
        yield made


def bound(bind_phase: str = "allocating", **status: str) -> dict[str, Any]:
    """The pod as HAMi's scheduler binds it."""
    annotations = {"hami.io/vgpu-node": "node-1", "hami.io/vgpu-devices-allocated": f"{UUID},NVIDIA,1000,0:;", PHASE: bind_phase}
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    return {
        "metadata": {"namespace": "team", "name": "h", "uid": "uid-h", "annotations": annotations},
        "spec": {"nodeName": "node-1", "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending", **status},
    }


async def show(cluster: Cluster, **changes: str) -> None:
    """The API server has the pod, and the cache too."""
    cluster.api.put_document(document := bound(**changes))
    phase = document["status"]["phase"]
    await cluster.until(lambda: getattr(cluster.cache.by_uid("uid-h"), "phase", None) == phase)
    cluster.decisions.report()
    await cluster.written()


async def hold(cluster: Cluster) -> None:
    """The ledger has the pod's devices."""
    state = cluster.world.agent_state
    registry = state.ledger.gpu_registry.register(UUID, 4096, 10)
    held = Allocation(
        id="a",
        pod=KEY,
        uid="uid-h",
        container="main",
        device_ids={"replica": {NAME: 1}},
        gpus={NAME: Amounts(0, 1000)},
    )
    await state.commit(state.ledger.with_gpu_registry(registry).occupy(held))


def locked(cluster: Cluster) -> bool:
    return LOCK in cluster.api.written.annotations


def phase(cluster: Cluster) -> str:
    return cluster.api.annotations("uid-h")[PHASE]


async def test_a_pod_with_its_devices_is_three_requests(cluster: Cluster) -> None:
    await show(cluster)
    assert (cluster.writes, locked(cluster)) == ([], True)
    await hold(cluster)
    cluster.add(what="granted", id="a", call="allocate", pod=KEY, pod_uid="uid-h")
    cluster.decisions.report()
    await cluster.written()
    assert not locked(cluster), "it goes at once"
    await cluster.look()
    assert (cluster.writes, phase(cluster)) == (["annotate", "pod", "event"], "success")
    await show(cluster, bind_phase="success", phase="Succeeded")
    cluster.api.remove("uid-h")
    await cluster.until(lambda: cluster.cache.by_uid("uid-h") is None)
    await cluster.look()
    assert cluster.writes == ["annotate", "pod", "event"]


async def test_an_agent_that_was_killed_before_it_wrote_does_it_after_its_start(cluster: Cluster) -> None:
    await hold(cluster)
    await show(cluster)
    assert not locked(cluster)
    await cluster.look()
    await cluster.look()
    assert phase(cluster) == "success"


async def test_devices_that_are_found_later_count(cluster: Cluster) -> None:
    """The ledger was lost, and is adopted from the kubelet after the pods were listed."""
    await show(cluster)
    await hold(cluster)
    await cluster.look()
    assert not locked(cluster)


@pytest.mark.hami_bug("B7: a refused pod locks the node for 5 minutes")
@pytest.mark.parametrize("refused", [False, True], ids=["by the kubelet itself", "by an agent that did not know it yet"])
async def test_a_refused_pod_that_the_agent_sees_later_ends_the_lock(cluster: Cluster, refused: bool) -> None:
    if refused:
        cluster.add(what="refused", call="allocate", pod=KEY, pod_uid="uid-h", why="not known")
    await show(cluster)
    assert locked(cluster)
    await show(cluster, phase="Failed", reason="OutOfcpu")
    assert (locked(cluster), phase(cluster)) == (False, "failed")


async def test_a_pod_that_is_deleted_before_it_has_its_devices_ends_the_lock(cluster: Cluster) -> None:
    await show(cluster)
    cluster.api.remove("uid-h")
    await cluster.until(lambda: not locked(cluster))


@pytest.mark.parametrize("result", ["success", "failed"])
async def test_pods_of_which_the_result_is_known_cause_no_write(cluster: Cluster, result: str) -> None:
    await show(cluster, bind_phase=result)
    await show(cluster, bind_phase=result, phase="Failed")
    assert (cluster.writes, locked(cluster)) == ([], True)
