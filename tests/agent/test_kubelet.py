"""The kubelet starts, stops, drops its plugins and returns errors; the agent continues."""

from pathlib import Path

import pytest

from gpumgr.common.units import CORE_RESOURCE
from gpumgr.sim.demo.node import SimulatedNode

from .stage import app, init, refused, run, running, stage


async def until_registered(node: SimulatedNode, count: int) -> None:
    """So many Register calls in all, and both resources offered."""
    await node.kubelet.until(lambda: len(node.kubelet.registrations) >= count)
    await node.until_offered()


async def test_a_kubelet_restart_and_removed_sockets_are_noticed(folder: Path) -> None:
    async with running(folder) as node:
        pid = node.agent.pid
        pods = [await run(node, "a", init(10, 1), app(30, 4)), await run(node, "b", app(200))]
        before = node.ledger()

        await node.kubelet.restart(sources_ready=False)
        await node.until_offered()
        assert node.ledger() == before
        node.kubelet.finish_sources()

        for number, socket in enumerate(node.kubelet.plugin_folder.glob("gpumgr-*.sock"), start=1):
            count = len(node.kubelet.registrations)
            socket.unlink()
            await until_registered(node, count + 1)
            assert len(node.agent_log.find("registration_lost", reason="own_socket_removed")) >= number

        await run(node, "c", app(60, 4))
        for pod in pods:
            await node.kubelet.start_container(pod, "main")
        assert node.disagreements() == []
        assert node.ledger().allocations.items() >= before.allocations.items()
        assert node.agent.pid == pid


async def test_the_agent_waits_for_a_kubelet_that_is_absent_or_refuses(folder: Path) -> None:
    async with stage(folder) as node:
        await node.kubelet.kill()
        await node.agent.start()
        await node.agent.while_running(node.agent_log.until("registration_failed", resource=CORE_RESOURCE))
        node.kubelet.register_error = "not today"
        await node.kubelet.start()
        await node.agent_log.until_match(lambda line: "not today" in line.get("error", ""))
        node.kubelet.register_error = None
        await node.until_offered()
        await run(node, "a", app(30, 4))


@pytest.mark.parametrize("api_server", [True, False], ids=["API server", "standalone"])
async def test_a_kubelet_that_lost_its_checkpoint_gets_no_gpu_of_a_running_container(folder: Path, api_server: bool) -> None:
    """It offers all ids again."""
    async with running(folder, api_server=api_server) as node:
        first = await run(node, "first", app(300))
        before = node.ledger()
        await node.kubelet.kill()
        node.kubelet.checkpoint.unlink()
        await node.kubelet.start()
        await node.until_offered()
        node.delete(await refused(node, "refused", app(200), why="2 entirely free GPUs requested, 1 of 4 are free"))
        fits = await run(node, "fits", app(100))
        (mine,) = before.allocations.values()
        assert not {*mine.gpus} & node.gpus_of(fits)
        kept = await node.agent_log.until("offered_ids_kept", allocation=mine.id)
        assert kept["reason"] == "its pod runs"

        node.delete(first)
        node.delete(fits)
        await run(node, "next", app(400))
