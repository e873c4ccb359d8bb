"""GPUs of which the driver does not report what it reports of others."""

from pathlib import Path

from gpumgr.units import CORE_RESOURCE

from .stage import app, stage
from .test_broken_gpus import FOUR_GPUS, asked, condition, events, until


async def test_gpus_of_wsl_are_offered_with_their_device_and_closed_without_it(folder: Path) -> None:
    sim, dev = folder / "wsl.yaml", folder / "dev"
    sim.write_text(FOUR_GPUS.replace("mig: disabled", "unsupported: [nvmlDeviceGetMinorNumber]"))
    dev.mkdir()
    settings: dict[str, dict[str, object]] = {"container": {"device_root": str(dev)}}
    why = f"the driver reports no minor number of it, and there is no {dev}/dxg, which GPUs of WSL2 have"
    async with stage(folder, sim=str(sim), settings=settings) as node:
        await node.agent.start()
        await node.agent.while_running(node.agent_log.until("ready"))
        await until(lambda: condition(node).get("message", "").count(why) == 4)
        await until(lambda: any(why in each for each in events(node, "GpuUnhealthy")))
        assert node.kubelet.node_status()[CORE_RESOURCE].allocatable == 0
        assert {gpu["message"] for gpu in (await asked(node, "/api/state"))["gpus"]} == {why}
        (dev / "dxg").touch()
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 400)
        for pod in (node.pod("share", app(30, 4)), node.pod("whole", app(200, 0))):
            assert (await node.run(pod)).phase == "Running"
            devices = (await node.kubelet.start_container(pod, "main")).devices
            assert [(each.container_path, each.host_path) for each in devices] == [("/dev/dxg", f"{dev}/dxg")]
