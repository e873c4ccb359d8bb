"""Burst of memory with the whole agent and the limiter's pages: annotation, limit, closed ids, and the start of another pod."""

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from gpumgr.sim.kubelet_pods import SimKubeletError
from tests.background import until

from .limiter import MIB, annotate, limits
from .stage import BLOCKS, app, introduce, run, running

SETTINGS: Final = {
    "nvml": {"sample_period_seconds": 0.2},
    "enforcement": {"backend": "limiter", "memory_burst": True},
}


async def restarted_often(node: SimulatedNode, pod: SimPod) -> None:
    async with asyncio.timeout(60):
        while True:
            await node.restart_container(pod)


async def test_a_pod_bursts_and_gives_way_to_the_next_one(bounded: Path) -> None:
    async with running(bounded, settings=SETTINGS) as node:
        greedy = await run(node, "greedy", app(10, 4))
        (gpu,) = node.gpus_of(greedy)
        await annotate(node, greedy, memory_limit='{"main": 4000}')
        await until(lambda: limits(node, greedy)[1] == 4000)
        node.use(greedy, memory_bytes=2049 * MIB)
        await until(lambda: node.healthy(gpu)["memory"] == BLOCKS - 5)

        # A pod that needs more than is left there goes to another GPU; one that fits takes the rest.
        others = [node.pod(name, app(10, size)) for name, size in (("large", 8), ("small", 7))]
        for pod in others:
            await introduce(node, pod)
            assert (await node.run(pod)).phase == "Running"
        assert [node.gpus_of(pod) == {gpu} for pod in others] == [False, True]
        await until(lambda: limits(node, greedy)[1] == 4096 - 7 * 256)

        # The simulated driver lets it go on, as one does in the moment before its limit falls. The next sample shows it.
        node.use(greedy, memory_bytes=3000 * MIB)
        with pytest.raises(SimKubeletError, match=re.escape("demo/greedy (main) holds 1976 MiB above its request")):
            await restarted_often(node, others[1])
        node.use(greedy, memory_bytes=1024 * MIB)
        await until(lambda: node.healthy(gpu)["memory"] == BLOCKS)
        await node.restart_container(others[1])
        assert not node.agent_log.find("enforcement_finding", code="tampered")

        await annotate(node, greedy, memory_limit='{"main": 1}')
        await node.agent_log.until("memory_limit_ignored")
        await until(lambda: limits(node, greedy)[1] == 1024)
