"""The query commands of an operator against the agent: their output for pods that only the API server lists, for pods on a
GPU that is lost, and without the agent."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import PodStatus

from .stage import app, running, until_sampled


async def gpumgr(node: SimulatedNode, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, what it printed, and what it said besides."""
    command = (sys.executable, "-m", "gpumgr", *arguments, "--config", str(node.config))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def until_shown(node: SimulatedNode, name: str, what: str) -> str:
    """The output of `why` for the pod, after the agent's watch has received the pod as the API server has it now."""
    while True:
        _, out, _ = await gpumgr(node, "why", name)
        if what in out:
            return out
        await asyncio.sleep(0.1)


async def test_why_describes_a_pod_that_only_the_api_server_lists(folder: Path) -> None:
    async with running(folder) as node:
        node.set_status(node.pod("waits", app(20, 4)), PodStatus(phase="Pending"))
        await until_shown(node, "waits", "Pod demo/waits, uid uid-1, Pending.\n")
        assert (await node.run(node.pod("big3", app(500)))).phase == "Failed"
        told = await until_shown(node, "big3", "Failed.\nIts status: UnexpectedAdmissionError: Allocate failed due to ")
        assert told.startswith("Pod demo/big3, uid uid-2, Failed.\n")
        assert "Requested: 500, Available: 400" in told
        code, out, err = await gpumgr(node, "history", "--pod", "big3")
        assert (code, out) == (0, "")
        assert "the history has no such entry of pod demo/big3; `gpumgr why` shows" in err


async def test_why_reports_a_lost_and_cordoned_gpu_of_a_pod_with_the_agent_and_without(folder: Path) -> None:
    async with running(folder) as node:
        pod = node.pod("a", app(40, 4))
        assert (await node.run(pod)).phase == "Running"
        (gpu,) = node.gpus_of(pod)
        await node.maintain("cordon", gpu, reason="broken fan")
        node.control.lose_gpu(node.indices[gpu])
        await node.agent_log.until("gpu_health_changed", gpu=node.description.uuid_of(node.indices[gpu]), state="unhealthy")
        await until_sampled(node)
        _, told, _ = await gpumgr(node, "why", "a")
        happened, _, seat = told.partition("It holds:\n")
        assert "Z  gpu cordoned\n" in happened
        assert "Z  gpu lost\n" in happened
        assert f"    GPU{node.indices[gpu]} is cordoned since" in seat
        assert ": broken fan\n" in seat
        assert f"    GPU{node.indices[gpu]} takes nothing new: " in seat
        await node.agent.stop()
        code, told, err = await gpumgr(node, "usage")
        assert code == 0
        assert "last written at" in err
        assert "demo/a" in told
        assert ": broken fan\n" in told
