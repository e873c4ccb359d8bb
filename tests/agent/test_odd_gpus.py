"""GPUs about which the driver reports less than about others."""

import re
from pathlib import Path

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, Amounts
from tests.background import until

from .stage import app, asked, condition, events, refused, run, stage, until_sampled
from .test_broken_gpus import FOUR_GPUS
from .test_replicas import BOTH, VGPU, vgpu


async def test_gpus_of_wsl_are_offered_with_their_device_and_closed_without_it(folder: Path) -> None:
    sim, dev = folder / "wsl.yaml", folder / "dev"
    sim.write_text(FOUR_GPUS.replace("mig: disabled", "unsupported: [nvmlDeviceGetMinorNumber]"))
    dev.mkdir()
    settings: dict[str, dict[str, object]] = {"container": {"device_root": str(dev)}}
    why = f"the driver reports no minor number for it, and {dev}/dxg, the device node of WSL2's GPUs, does not exist"
    async with stage(folder, sim=str(sim), settings=settings) as node:
        await node.agent.start()
        await node.agent.while_running(node.agent_log.until("ready"))
        await until(lambda: condition(node).get("message", "").count(why) == 4)
        await until(lambda: any(why in each for each in events(node, "GpuUnhealthy")))
        assert node.kubelet.node_status()[CORE_RESOURCE].allocatable == 0
        assert {gpu["message"] for gpu in (await asked(node, "/api/state"))["gpus"]} == {why}
        (dev / "dxg").touch()
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 400)
        await node.until_offered()  # the blocks too, which have a stream of their own
        for name, container in (("share", app(30, 4)), ("whole", app(200, 0))):
            pod = await run(node, name, container)
            devices = (await node.kubelet.start_container(pod, "main")).devices
            assert [(each.container_path, each.host_path) for each in devices] == [("/dev/dxg", f"{dev}/dxg")]


async def test_gpus_without_memory_information_are_granted_whole(folder: Path) -> None:
    async with stage(folder, sim=str(without_memory(folder))) as node:
        await node.agent.start()
        await node.agent.while_running(node.kubelet.until_allocatable(CORE_RESOURCE))
        await node.agent.while_running(node.kubelet.until(lambda: MEMORY_RESOURCE in node.kubelet.node_status()))
        status = node.kubelet.node_status()
        assert (status[CORE_RESOURCE].allocatable, status[MEMORY_RESOURCE].allocatable) == (400, 0)
        await refused(node, "share", app(30, 4), why="nvml.unreported_memory_mebibytes")
        for name, cores in (("one", 100), ("two", 200)):
            await run(node, name, app(cores))
        await until_sampled(node)
        state = await asked(node, "/api/state")
        assert {(gpu["memory_bytes"], gpu["memory_blocks"], gpu["memory_used_bytes"]) for gpu in state["gpus"]} == {
            (None, 0, None)
        }
        assert {(row["whole"], row["memory_bytes"]) for row in state["containers"]} == {(True, None)}
        metrics = await asked(node, "/metrics")
        assert "gpumgr_gpu_healthy{" in metrics
        assert not re.search(r"^gpumgr_gpu_memory_(total|used|allocated)_bytes\{", metrics, re.MULTILINE)
        assert node.disagreements() == []


async def test_a_gpu_without_memory_information_is_one_replica(folder: Path) -> None:
    """Resource nvidia.com/gpu: a container that requests no part of the memory gets the whole GPU."""
    async with stage(folder, sim=str(without_memory(folder))) as node:
        await node.agent.start({**BOTH, "GPUMGR_NODE_PROFILE": "hami", "GPUMGR_HAMI_DEVICE_MEMORY_SCALING": "1"})
        await node.kubelet.until_allocatable(VGPU)
        assert node.kubelet.node_status()[VGPU].allocatable == 4
        await refused(node, "share", vgpu(gpumem=1001), why="nvml.unreported_memory_mebibytes")
        for name, gpus in (("one", 1), ("two", 2)):
            await run(node, name, vgpu(gpus=gpus))
        held = [amounts for each in node.ledger().allocations.values() for amounts in each.gpus.values()]
        assert held == [Amounts(100, 0)] * 3


def without_memory(folder: Path) -> Path:
    sim = folder / "gb10.yaml"
    unsupported = "unsupported: [nvmlDeviceGetMemoryInfo, nvmlDeviceGetMemoryInfo_v2]"
    sim.write_text(FOUR_GPUS.replace("mig: disabled", unsupported))
    return sim
