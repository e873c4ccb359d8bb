"""Resize with the whole agent, the limiter's pages and the command: answer, limits, closed ids, and an agent that is killed in between."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.common.units import Amounts
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.limiter import pages
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tools import PROJECT

from .stage import BLOCKS, RUNNER, app, running, until

MIB: Final = 1 << 20
SETTINGS: Final = {
    "nvml": {"sample_period_seconds": 0.2},
    "enforcement": {"backend": "limiter", "max_growth_cores": 50, "max_growth_memory_mebibytes": 2048},
}


@pytest.fixture
def bounded(folder: Path) -> Iterator[Path]:
    """The folder; root gets a tmpfs for the pages of each container there."""
    yield folder
    for pages_of_one in (folder / "run/limiter").glob("*"):
        BoundedFolders().remove(pages_of_one)


def limits(folder: Path, node: SimulatedNode, pod: SimPod) -> tuple[int, int]:
    """Cores and MiB in the container's page."""
    (allocation,) = node.ledger().of(None, pod.uid)
    (found,) = pages.decode_limits((folder / "run/limiter" / allocation.id / f"limits.{pages.VERSION}").read_bytes())
    return found.share_percent, found.memory_bytes // MIB


async def resize(
    folder: Path, *arguments: str, command: str = "resize", location: str = "--kubeconfig=kubeconfig"
) -> tuple[int, str]:
    """The command's exit code, and what it prints."""
    words = (sys.executable, "-m", "gpumgr", command, *arguments, location)
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ended = await asyncio.create_subprocess_exec(
        *words, cwd=folder, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await ended.communicate()
    assert ended.returncode is not None
    return ended.returncode, out.decode()


def answer(node: SimulatedNode, pod: SimPod) -> Mapping[str, Any]:
    assert node.api is not None
    found: Mapping[str, Any] = json.loads(node.api.annotations(pod.uid).get("gpumgr.io/resized", "{}")).get("main", {})
    return found


async def started(node: SimulatedNode) -> SimPod:
    """A pod that runs. The agent has written its annotation of what containers hold, which the command reads."""
    pod = node.pod("notebook", app(30, 8))
    assert (await node.run(pod)).phase == "Running"
    api = node.api
    assert api is not None
    await until(lambda: ALLOCATIONS in api.annotations(pod.uid))
    return pod


async def test_a_pod_is_resized_by_the_command(bounded: Path) -> None:
    async with running(bounded, settings=SETTINGS) as node:
        pod = await started(node)
        (gpu,) = node.gpus_of(pod)
        node.use(pod, memory_bytes=1024 * MIB)

        assert await resize(bounded, "demo/notebook", "--memory", "1200") == (
            0,
            "container main has 30 cores and 1200 MiB of each of its GPUs\n",
        )
        await until(lambda: limits(bounded, node, pod) == (30, 1200))
        assert node.healthy(gpu)["memory"] == BLOCKS, "the kubelet's ids stay with the pod"

        code, out = await resize(bounded, "demo/notebook", "--memory", "1000")
        assert code == 1
        assert "not resized: it uses 1024 MiB of GPU" in out
        assert "container main has 30 cores and 1200 MiB of each of its GPUs" in out
        assert limits(bounded, node, pod) == (30, 1200)

        assert (await resize(bounded, "demo/notebook", "--cores", "60", "--memory", "3000"))[0] == 0
        await until(lambda: limits(bounded, node, pod) == (60, 3000))
        await until(lambda: node.healthy(gpu) == {**node.healthy(gpu), "core": 70, "memory": BLOCKS - 4})
        code, out = await resize(bounded, "demo/notebook", "--cores", "90")
        assert "the pod would have 60 cores above its requests, and this node allows 50 (enforcement.max_growth_cores)" in out
        assert not node.agent_log.find("enforcement_finding", code="tampered")
        assert len(node.agent_log.find("resize_decided")) == 4
        _, story = await resize(bounded, "demo/notebook", command="why", location="--socket=agent.sock")
        assert "main has 60 cores and 2.9 GiB of GPU0" in story
        assert "container main is not resized: it uses 1024 MiB of GPU" in " ".join(story.split())

        node.delete(pod)
        await until(lambda: node.healthy(gpu) == {**node.healthy(gpu), "core": 100, "memory": BLOCKS})


async def test_a_kill_between_the_save_and_the_change_loses_and_repeats_nothing(bounded: Path) -> None:
    """A pod's two calls and its name are the commits before the resize."""
    async with running(bounded, settings=SETTINGS, command=RUNNER) as node:
        pod = await started(node)
        await node.agent.kill()
        await node.start_agent({"DIE_AT": "after_commit_before_answer"})
        command = asyncio.create_task(resize(bounded, "demo/notebook", "--cores", "60", "--memory", "1000"))
        await node.agent.ended()
        (allocation,) = node.ledger().of(None, pod.uid)
        (gpu,) = allocation.gpus
        assert allocation.limits_on(gpu) == Amounts(60, 1000)
        assert limits(bounded, node, pod) == (30, 2048), "no limit changes before the decision is on disk"
        assert not answer(node, pod)

        await node.start_agent()
        await until(lambda: limits(bounded, node, pod) == (60, 1000))
        assert await command == (0, "container main has 60 cores and 1000 MiB of each of its GPUs\n")
        assert not node.agent_log.find("enforcement_finding", code="tampered")
        assert not node.agent_log.find("resize_decided"), "the second agent decided nothing"
        assert node.ledger().allocations[allocation.id] == allocation


async def test_a_pod_starts_next_to_a_resized_one_although_the_next_sample_is_an_hour_away(bounded: Path) -> None:
    """After a restart of the agent, the start waits until the limits are set again, and for a sample after that."""
    async with running(bounded, settings=SETTINGS) as node:
        pod = await started(node)
        assert (await resize(bounded, "demo/notebook", "--memory", "1000"))[0] == 0
        await node.agent.kill()
        node.config.write_text(node.config.read_text().replace("sample_period_seconds: 0.2", "sample_period_seconds: 3600"))
        await node.start_agent()
        after = node.pod("next", app(30, 8))
        assert (await node.run(after)).phase == "Running"
        assert node.gpus_of(after) == node.gpus_of(pod)
