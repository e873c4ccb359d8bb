"""An update of the agent: the new process starts beside the old one, waits for its end, and takes the node over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpumgr.common.units import RESOURCE_NAMES, RESOURCES
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.demo.process import AgentLog, AgentProcess
from gpumgr.sim.kubelet_pods import V1_20, V1_25, V1_35, V1_37, KubeletVersion

from .stage import SIM, app, run, stage


@contextlib.asynccontextmanager
async def updating(folder: Path, **options: Any) -> AsyncIterator[SimulatedNode]:
    """A node with an agent that may be updated. The later processes end with the test."""
    async with stage(folder, **options) as node:
        await node.start_agent({"GPUMGR_PROCESS_INSTANCE": "first"})
        yield node


@contextlib.asynccontextmanager
async def beside(node: SimulatedNode, *arguments: str) -> AsyncIterator[AgentProcess]:
    """One more process of the agent on the node."""
    simulated = ["--sim", SIM, "--sim-dir", str(node.folder / "gpus")]
    agent = AgentProcess(["run", "--config", str(node.config), *simulated, *arguments], AgentLog())
    await agent.start({"GPUMGR_PROCESS_INSTANCE": "next"})
    try:
        yield agent
    finally:
        await agent.close()


async def readiness(agent: AgentProcess) -> tuple[int, str]:
    url = agent.agent_log.find("web_listening")[-1]["url"]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as answer:
        return answer.status, await answer.text()


async def until_it_waits(agent: AgentProcess) -> None:
    """Until a probe would call it ready although another process has the node."""
    await agent.while_running(agent.agent_log.until("web_listening"))
    while (await readiness(agent))[0] != 200:  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.02)


async def until_served_by(node: SimulatedNode, agent: AgentProcess) -> None:
    for kind in RESOURCES:
        await agent.while_running(agent.agent_log.until("registered", resource=RESOURCE_NAMES[kind]))
        await agent.while_running(node.kubelet.until_allocatable(RESOURCE_NAMES[kind]))


@pytest.mark.parametrize("shape", [V1_20, V1_25, V1_35, V1_37], ids=lambda shape: str(shape.version))
async def test_the_next_agent_registers_when_the_streams_of_the_former_one_have_ended(
    folder: Path, shape: KubeletVersion
) -> None:
    """A kubelet before 1.36 takes a stream that ends later for the new one's, and disconnects that."""
    async with updating(folder, shape=shape) as node:
        for number in range(2):
            await run(node, f"held-{number}", app(30, 4))
        old = node.agent
        async with beside(node) as new:
            await until_it_waits(new)
            await run(node, "between", app(10, 1))
            before = node.ledger()
            assert await old.stop() == 0
            await until_served_by(node, new)
            assert node.ledger() == before
            await run(node, "later", app(20, 2))
            assert node.disagreements() == []
            events = [line["event"] for line in new.agent_log.lines]
            assert events.index("other_agent_ended") < events.index("registered")
            assert "registration_lost" not in events
            assert events.count("registered") == len(RESOURCES)
            assert await new.stop() == 0


async def test_a_version_with_bad_settings_never_replaces_the_agent(folder: Path) -> None:
    async with updating(folder) as node:
        async with beside(node, "--set", "kubernetes.kubeconfig=/nowhere") as new:
            assert await new.ended() == 2
        await run(node, "later", app(20, 2))
        assert node.agent_log.find("stopping") == []


async def test_an_agent_that_is_killed_is_followed_by_the_one_that_waits(folder: Path) -> None:
    async with updating(folder) as node, beside(node) as new:
        await run(node, "held", app(30, 4))
        await until_it_waits(new)
        before = node.ledger()
        await node.agent.kill()
        await until_served_by(node, new)
        assert node.ledger() == before
        await run(node, "later", app(20, 2))
        async with beside(node) as back:  # the container of the killed one starts again
            await until_it_waits(back)
        assert node.disagreements() == []
