"""Bursts and resizes with the whole agent and the limiter's pages: annotation or command, limits, closed ids, the start of another pod, and
an agent that is killed in between."""

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from gpumgr.common.units import Amounts
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from gpumgr.sim.kubelet_pods import SimKubeletError
from tests.background import until

from .limiter import MIB, annotate, limits, started
from .stage import BLOCKS, RUNNER, app, gpumgr, introduce, run, running

SETTINGS: Final = {
    "nvml": {"sample_period_seconds": 0.2},
    "enforcement": {"backend": "limiter", "max_growth_cores": 50, "max_growth_memory_mebibytes": 2048},
}
BURST: Final = {**SETTINGS, "enforcement": {"backend": "limiter", "memory_burst": True}}


#: The command waits until a busy machine has started the next agent.
_PATIENT: Final = """
from gpumgr.cli import main, resize
vars(resize)["_ANSWER_SECONDS"] = 80.0
main()
"""


async def resize(node: SimulatedNode, *amounts: str) -> tuple[int | None, str]:
    """The command's exit code, and what it prints."""
    words = ("resize", "demo/notebook", *amounts, "--kubeconfig", node.folder / "kubeconfig")
    code, out, errors = await gpumgr(*words, program=("-c", _PATIENT))
    return code, out + errors


async def test_a_kill_between_the_save_and_the_change_loses_and_repeats_nothing(bounded: Path) -> None:
    """A pod's two calls and its name are the commits before the resize."""
    async with running(bounded, settings=SETTINGS, command=RUNNER) as node:
        pod = await started(node, "notebook", 30, 8)
        await node.agent.kill()
        await node.start_agent({"DIE_AT": "after_commit_before_answer"})
        command = asyncio.create_task(resize(node, "--cores", "60", "--memory", "1000"))
        await node.agent.ended()
        (allocation,) = node.ledger().of(None, pod.uid)
        (gpu,) = allocation.gpus
        assert allocation.limits_on(gpu) == Amounts(60, 1000)
        assert limits(node, pod) == (30, 2048), "no limit changes before the decision is on disk"
        assert node.api is not None
        assert "gpumgr.io/resized" not in node.api.annotations(pod.uid)

        await node.start_agent()
        await until(lambda: limits(node, pod) == (60, 1000))
        assert await command == (0, "container main has 60 cores and 1000 MiB of each of its GPUs\n")
        assert not node.agent_log.find("enforcement_finding", code="tampered")
        assert not node.agent_log.find("resize_decided"), "the second agent decided nothing"
        assert node.ledger().allocations[allocation.id] == allocation


async def test_a_pod_starts_next_to_a_resized_one_although_the_next_sample_is_an_hour_away(bounded: Path) -> None:
    """After a restart of the agent, the start waits until the limits are set again, and for a sample after that."""
    async with running(bounded, settings=SETTINGS) as node:
        pod = await started(node, "notebook", 30, 8)
        assert (await resize(node, "--memory", "1000"))[0] == 0
        await node.agent.kill()
        node.config.write_text(node.config.read_text().replace("sample_period_seconds: 0.2", "sample_period_seconds: 3600"))
        await node.start_agent()
        after = await run(node, "next", app(30, 8))
        assert node.gpus_of(after) == node.gpus_of(pod)


async def restarted_often(node: SimulatedNode, pod: SimPod) -> None:
    async with asyncio.timeout(60):
        while True:
            await node.restart_container(pod)


async def test_a_pod_bursts_and_gives_way_to_the_next_one(bounded: Path) -> None:
    async with running(bounded, settings=BURST) as node:
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
