"""The API server is unavailable, slow or available again while pods start and end. Every pod is found and attributed."""

from pathlib import Path

import pytest

from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tests.background import until

from .stage import PATIENT, app, init, run, running, stage

#: Where memory is asked for first and the spec is not known, a share may take an empty GPU: whole GPUs come first, so that all fit.
CROWD = {"c": (100, 0), "e": (100, 8), "a": (30, 4), "b": (30, 4), "d": (20, 2), "f": (5, 1)}


async def admit_all(node: SimulatedNode) -> dict[str, SimPod]:
    pods = {name: await run(node, name, app(*size)) for name, size in CROWD.items()}
    assert node.disagreements() == []
    return pods


async def replace_whole_gpus(node: SimulatedNode, pods: dict[str, SimPod]) -> None:
    """Their ids are offered again at once, and the kubelet's word is enough to take them back."""
    for name in ("c", "e"):
        node.delete(pods[name])
    await run(node, "pair", app(200))
    assert node.disagreements() == []
    assert len(node.ledger().allocations) == len(CROWD) - 1


async def test_without_an_api_server_podresources_identifies_the_containers(folder: Path) -> None:
    async with stage(folder, command=PATIENT) as node:
        assert node.api is not None
        await node.api.stop()
        await node.start_agent()
        await replace_whole_gpus(node, await admit_all(node))
        await node.agent_log.until("api_server_retries")


@pytest.mark.peer_bug("B2: it waits for the API server without end, with its lock held")
async def test_a_slow_or_broken_api_server_delays_no_admission(folder: Path) -> None:
    async with running(folder, command=PATIENT) as node:
        assert node.api is not None
        node.api.delay_seconds = 1.0  # the cache is always behind
        pods = await admit_all(node)
        await node.api.stop()
        await replace_whole_gpus(node, pods)
        node.api.delay_seconds = 0.0
        await node.api.start()
        node.delete(pods["a"])
        await node.agent_log.until("allocation_freed", holder="demo/a (main)")
        await run(node, "g", init(10, 1), app(20, 2))
        assert node.disagreements() == []


async def test_the_pods_of_the_node_that_cannot_be_read_are_counted(folder: Path) -> None:
    metadata = {"namespace": "demo", "name": "odd", "uid": "uid-odd"}
    odd = {"metadata": metadata, "spec": {"nodeName": "node", "containers": 7}, "status": {}}

    async def until_counted(count: int) -> None:
        async def counted() -> bool:
            return (await node.metrics())["gpumgr_api_objects_unreadable", frozenset()] == count

        await until(counted)

    async with running(folder) as node:
        assert node.api is not None
        await until_counted(0)
        node.api.put_document(odd)
        await until_counted(1)
        node.api.remove("uid-odd")
        await until_counted(0)
