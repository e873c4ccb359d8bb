"""The driver and its GPUs: absent, late, hanging, reloaded, lost and back; and processes that outlive their pod."""

import asyncio
from pathlib import Path

import pytest

from gpumgr.agent.state import QUARANTINE_NOTE
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.ledger.store import read_checkpoint
from gpumgr.sim.demo.node import SimulatedNode
from tests.background import until

from .stage import BLOCKS, HASTY, app, refused, run, running, stage, until_sampled


async def until_cores(node: SimulatedNode, count: int) -> None:
    await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == count)


async def until_noted(folder: Path, gpu: str) -> None:
    """Waits until the GPU's quarantine is in the checkpoint, which is written after the log line."""
    while gpu not in read_checkpoint(folder / "checkpoint").notes.get(QUARANTINE_NOTE, ""):  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.05)


async def test_a_driver_that_comes_later_is_waited_for(folder: Path) -> None:
    async with stage(folder, settings={"nvml": {"ready_grace_seconds": 0.2}}) as node:
        node.control.unload_driver()
        await node.agent.start()
        ready = await node.agent.while_running(node.agent_log.until("ready"))
        assert "no driver" in ready["status"]
        assert node.kubelet.node_status()[CORE_RESOURCE].capacity == 0
        node.control.load_driver()
        await node.until_offered()
        await until_cores(node, 400)
        await run(node, "a", app(30, 4))


async def test_a_driver_that_hangs_in_the_first_snapshot_delays_no_other_part(folder: Path) -> None:
    async with stage(folder, settings={"nvml": {"call_timeout_seconds": 2.0}}) as node:
        node.control.hang(function="nvmlSystemGetDriverVersion")
        await node.agent.start()
        down = await node.agent.while_running(node.agent_log.until("nvml_down"))
        assert "hangs" in down["reason"]
        await node.kubelet.until(lambda: len(node.kubelet.registrations) == 2)
        node.control.release()
        await node.until_offered()
        await run(node, "a", app(30, 4))


async def test_a_gpu_whose_calls_hang_is_out_of_service_by_name_and_the_others_are_granted(folder: Path) -> None:
    async with running(folder, settings={"nvml": {"call_timeout_seconds": 1.0}}) as node:
        tenant = await run(node, "tenant", app(100))
        (index,) = (node.indices[name] for name in node.gpus_of(tenant))
        (hung,) = (name for name, number in node.indices.items() if number == (index + 1) % 4)
        node.control.hang(gpu=node.indices[hung])
        changed = await node.agent_log.until("gpu_health_changed", reason="hang")
        assert changed["message"] == "the driver does not answer calls about this GPU"
        await node.kubelet.until(lambda: node.healthy(hung) == {"core": 0, "memory": 0})
        assert node.kubelet.node_status()[CORE_RESOURCE].allocatable == 300
        others = [await run(node, f"p{n}", app(100)) for n in range(2)]
        assert not any(hung in node.gpus_of(pod) for pod in others)
        node.delete(await refused(node, "refused", app(100)))
        sentence = f"GPU{node.indices[hung]} ({hung}): {changed['message']}"
        await until(lambda: node.api is not None and node.api.written.conditions["GpuTrouble"]["message"] == sentence)
        node.control.release()
        await node.kubelet.until(lambda: node.healthy(hung) == {"core": 100, "memory": BLOCKS})
        assert node.agent_log.find("nvml_down") == []
        assert node.disagreements() == []


@pytest.mark.peer_bug("B1: after an error of the driver it does not try again")
async def test_a_driver_reload_leaves_allocations_alone(folder: Path) -> None:
    async with running(folder) as node:
        pod = await run(node, "a", app(30, 4))
        before = node.ledger()
        node.control.unload_driver()
        await until_cores(node, 0)
        node.delete(await refused(node, "b", app(30, 4)))
        node.control.load_driver()
        await until_cores(node, 400)
        assert node.ledger() == before
        await node.kubelet.start_container(pod, "main")
        assert node.disagreements() == []


async def test_a_driver_of_another_version_ends_the_process_with_5(folder: Path) -> None:
    async with running(folder) as node:
        node.control.unload_driver()
        node.control.load_driver("999.1")
        assert await node.agent.ended() == 5
        await node.start_agent()
        await until_cores(node, 400)


async def test_a_gpu_with_a_process_of_an_ended_pod_is_in_quarantine(folder: Path) -> None:
    async with running(folder, command=HASTY) as node:
        tenant = await run(node, "tenant", app(100))
        (name,) = node.gpus_of(tenant)
        leftover = node.start_process_outside_containers(node.indices[name], memory_bytes=1 << 20)
        await until_sampled(node)
        node.delete(tenant)
        held = await node.agent_log.until("gpu_quarantined", gpu=name)
        assert f"pid {leftover}" in held["reason"]
        await node.kubelet.until(lambda: node.healthy(name)["core"] == 0)
        await until_noted(folder, name)

        await node.agent.kill()
        await node.start_agent()
        next_pod = await run(node, "next", app(100))
        assert node.gpus_of(next_pod) != {name}
        node.end_process_outside_containers(leftover)
        await node.agent_log.until("gpu_released", gpu=name)
        await node.kubelet.until(lambda: node.healthy(name)["core"] == 100)


async def test_a_process_of_a_pod_that_ended_while_no_agent_ran_holds_its_gpu(folder: Path) -> None:
    """Only the first sample of the next agent shows that the process belongs to the pod."""
    async with running(folder, settings={"nvml": {"sample_period_seconds": 3600}}) as node:
        tenant = await run(node, "tenant", app(100))
        (name,) = node.gpus_of(tenant)
        node.start_process_outside_containers(node.indices[name], memory_bytes=1 << 20)
        await node.agent.kill()
        node.delete(tenant)
        assert node.api is not None
        node.api.delay_seconds = 0.3  # the agent's start waits for the pods, and the first sample does not
        await node.start_agent()
        await until_noted(folder, name)
