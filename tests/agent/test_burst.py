"""Burst of memory with the whole agent and the limiter's pages: annotation, limit, closed ids, and the start of another pod."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.limiter import pages
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from gpumgr.sim.kubelet_pods import SimKubeletError

from .stage import BLOCKS, app, introduce, running, until

MIB: Final = 1 << 20
SETTINGS: Final = {
    "nvml": {"sample_period_seconds": 0.2},
    "enforcement": {"backend": "limiter", "memory_burst": True},
}


async def annotate(node: SimulatedNode, pod: SimPod, limit: str) -> None:
    assert node.api is not None
    body = {"metadata": {"annotations": {"gpumgr.io/memory-limit": limit}}}
    async with (
        aiohttp.ClientSession() as http,
        http.patch(
            f"{node.api.url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}",
            json=body,
            headers={"Content-Type": "application/merge-patch+json"},
        ) as answer,
    ):
        assert answer.status == 200


def limit_mebibytes(folder: Path, node: SimulatedNode, pod: SimPod) -> int:
    (allocation,) = node.ledger().of(None, pod.uid)
    page = folder / "run/limiter" / allocation.id / f"limits.{pages.VERSION}"
    (limits,) = pages.decode_limits(page.read_bytes())
    return limits.memory_bytes // MIB


async def restarted_often(node: SimulatedNode, pod: SimPod) -> None:
    async with asyncio.timeout(60):
        while True:
            await node.restart_container(pod)


@pytest.fixture
def bounded(folder: Path) -> Iterator[Path]:
    """The folder; root gets a tmpfs for the pages of each container there."""
    yield folder
    for pages_of_one in (folder / "run/limiter").glob("*"):
        BoundedFolders().remove(pages_of_one)


async def test_a_pod_bursts_and_gives_way_to_the_next_one(bounded: Path) -> None:
    async with running(bounded, settings=SETTINGS) as node:
        greedy = node.pod("greedy", app(10, 4))
        assert (await node.run(greedy)).phase == "Running"
        (gpu,) = node.gpus_of(greedy)
        await annotate(node, greedy, '{"main": 4000}')
        await until(lambda: limit_mebibytes(bounded, node, greedy) == 4000)
        node.use(greedy, memory_bytes=2049 * MIB)
        await until(lambda: node.healthy(gpu)["memory"] == BLOCKS - 5)

        # A pod that needs more than is left there goes to another GPU; one that fits takes the rest.
        others = [node.pod(name, app(10, size)) for name, size in (("large", 8), ("small", 7))]
        for pod in others:
            await introduce(node, pod)
            assert (await node.run(pod)).phase == "Running"
        assert [node.gpus_of(pod) == {gpu} for pod in others] == [False, True]
        await until(lambda: limit_mebibytes(bounded, node, greedy) == 4096 - 7 * 256)

        # The simulated driver lets it go on, as one does in the moment before its limit falls. The next sample shows it.
        node.use(greedy, memory_bytes=3000 * MIB)
        with pytest.raises(SimKubeletError, match=re.escape("demo/greedy (main) holds 1976 MiB above its request")):
            await restarted_often(node, others[1])
        node.use(greedy, memory_bytes=1024 * MIB)
        await until(lambda: node.healthy(gpu)["memory"] == BLOCKS)
        await node.restart_container(others[1])
        assert not node.agent_log.find("enforcement_finding", code="tampered")

        await annotate(node, greedy, '{"main": 1}')
        await node.agent_log.until("memory_limit_ignored")
        await until(lambda: limit_mebibytes(bounded, node, greedy) == 1024)
