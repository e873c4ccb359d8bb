"""GPUs that are broken when the agent starts: every interface reports them, and the others keep their indexes of the driver."""

import re
from pathlib import Path

import aiohttp
import pytest

from gpumgr.common.units import CORE_RESOURCE
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimKubeletError
from tests.background import until
from tests.component.driver.smi import install_smi

from .stage import HASTY, SIM, app, asked, condition, events, refused, run, running, stage, until_sampled

FOUR_GPUS = Path(SIM).read_text()
LOST = "GPU1 can't be described: nvmlDeviceGetHandleByIndex: GPU is lost (NVML error 15)"


async def until_shown(node: SimulatedNode, line: str) -> None:
    """Until the metrics have this line: their page is rendered once a sample period while it has readers."""

    async def shown() -> bool:
        return line in await asked(node, "/metrics")

    await until(shown)


async def test_a_gpu_has_the_same_number_everywhere_though_one_before_it_is_broken(folder: Path) -> None:
    async with running(folder) as node:
        node.control.lose_gpu(1)
        await node.agent.kill()
        await node.start_agent()
        names = {index: name for name, index in node.indices.items()}
        done = await node.maintain("cordon", "2", reason="a fan")
        assert (done["gpu"]["index"], done["gpu"]["name"]) == (2, names[2])
        told = f"GPU2 ({names[2]})"
        await until(lambda: events(node, "GpuCordoned") == [f"{told}: a fan"])
        await until(lambda: f"{told} is cordoned: a fan" in condition(node).get("message", ""))

        state = await asked(node, "/api/state")
        numbers = {gpu["name"]: (gpu["index"], gpu["row"]) for gpu in state["gpus"]}
        assert numbers == {names[0]: (0, 0), names[1]: (None, None), names[2]: (2, 1), names[3]: (3, 2)}
        graph = await asked(node, "/graph", format="text")
        assert re.findall(r"GPU([0-9]):.*\n.*GPU-([0-9a-f]{8})", graph) == [(str(n), names[n]) for n in (0, 2, 3)]

        for name in ("a", "b"):
            await run(node, name, app(60, 4))
        pod = await refused(node, "c", app(60, 4))
        story = await asked(node, f"/api/pods/{pod.namespace}/{pod.name}")
        (entry,) = [each for each in story["history"] if each["what"] == "refused"]
        assert f"{told} not offered" in entry["why"]
        assert {gpu["gpu"]: gpu["index"] for gpu in entry["candidates"]} == {names[n]: n if n != 1 else None for n in names}
        with pytest.raises(aiohttp.ClientResponseError):
            await node.maintain("drain", "1")


@pytest.mark.parametrize("listed", [4, 0])
async def test_gpus_that_the_driver_does_not_list_are_in_condition_readiness_and_metrics(folder: Path, listed: int) -> None:
    """Without any GPU in the driver's list the node is not ready."""
    empty = folder / "none.yaml"
    empty.write_text("{about: none, driver_version: 550.90.07, cuda_version: 12.4, models: {}, gpus: []}")
    device = folder / "gpus/sys/bus/pci/devices/0000:aa:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    sentence = f"the driver lists {listed} of the {listed + 1} NVIDIA GPUs on the PCI bus, not 0000:aa:00.0: see `dmesg`"
    async with stage(folder, sim=SIM if listed else str(empty), command=HASTY) as node:
        await node.agent.start()
        await node.agent.while_running(node.agent_log.until("ready"))
        await until(lambda: condition(node).get("message") == sentence)
        assert (condition(node)["status"], condition(node)["reason"]) == ("True", "GpuNotListed")
        async with aiohttp.ClientSession() as http, http.get(f"{node.url}/readyz") as answer:
            assert answer.status == (200 if listed else 503)
            assert (await answer.json())["reasons"] == [sentence]
        assert "gpumgr_gpus_not_listed 1\n" in await asked(node, "/metrics")
        for path in (*device.iterdir(), device):
            path.rmdir() if path.is_dir() else path.unlink()
        await until(lambda: condition(node)["status"] == "False")
        await until_shown(node, "gpumgr_gpus_not_listed 0\n")


async def test_a_card_that_was_replaced_while_the_node_was_off_is_forgotten(folder: Path) -> None:
    sim = folder / "node.yaml"
    sim.write_text(FOUR_GPUS)
    async with stage(folder, sim=str(sim)) as node:
        await node.start_agent()
        (old,) = (name for name, index in node.indices.items() if index == 1)
        await until_sampled(node)
        await node.agent.kill()
        new = "uuid: GPU-aaaabbbb-cccc-4ddd-8eee-ffff00001111"
        sim.write_text(FOUR_GPUS.replace("bus_id: 0000:19:00.0,", f"bus_id: 0000:19:00.0, {new},"))
        await node.agent.start()
        await until(lambda: old in condition(node).get("message", ""))
        await node.agent_log.until("gpu_forgotten")
        await until(lambda: condition(node)["message"] == "4 GPUs, none in trouble")
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].capacity == 400)
        await until(lambda: len(events(node, "GpuForgotten")) == 1)
        assert "is at its PCI address 0000:19:00.0" in events(node, "GpuForgotten")[0]


async def test_a_container_does_not_start_again_with_the_device_node_of_another_gpu(folder: Path) -> None:
    """The driver numbers its GPUs anew when it is loaded, and the kubelet keeps the response of the first start."""
    sim = folder / "node.yaml"
    sim.write_text(FOUR_GPUS)
    for name in ("nvidia0", "nvidia1"):
        (folder / name).touch()
    async with stage(folder, sim=str(sim), settings={"container": {"device_root": str(folder)}}) as node:
        await node.start_agent()
        pods = {number: await run(node, f"p{number}", app(100, 4)) for number in (0, 1)}
        for minors in ((1, 0), (0, 1)):
            await node.agent.kill()
            text = FOUR_GPUS
            for place, minor in zip(("18", "19"), minors, strict=True):
                text = text.replace(f"bus_id: 0000:{place}:00.0,", f"bus_id: 0000:{place}:00.0, minor: {minor},")
            sim.write_text(text)
            await node.start_agent()
            for number, pod in pods.items():
                if minors == (1, 0):
                    wrong = re.escape(f"the container would get nvidia{number}, but its GPUs are nvidia{1 - number} now")
                    with pytest.raises(SimKubeletError, match=wrong):
                        await node.kubelet.start_container(pod, "main")
                else:
                    assert (await node.kubelet.start_container(pod, "main")).devices[0].host_path == f"{folder}/nvidia{number}"


async def test_a_broken_gpu_is_cordoned_also_after_a_kill_and_healthy_after_a_reset(folder: Path) -> None:
    program = install_smi(folder)
    environ = {"FAKE_SMI_NODE": str(folder / "gpus")}
    async with running(folder, environ=environ, settings={"nvml": {"smi_program": program}}, command=HASTY) as node:
        (name,) = (name for name, index in node.indices.items() if index == 2)

        def offered() -> bool:
            return any(healthy for device_id, (healthy, _) in node.kubelet.devices(CORE_RESOURCE).items() if name in device_id)

        await node.maintain("cordon", name, reason="falls off the bus")
        await until(lambda: not offered())
        await node.agent.kill()
        node.control.lose_gpu(2)
        await node.start_agent(environ)
        assert not offered()
        assert "successfully reset" in (await node.maintain("reset", name))["said"]
        await until(lambda: condition(node).get("message") == f"GPU2 ({name}) is cordoned: falls off the bus")
        assert not offered()
        await node.maintain("uncordon", name)
        await until(offered)
        codes = [entry["code"] for entry in (await asked(node, "/api/state"))["history"]]
    assert codes == ["uncordoned", "reset", "not_readable", "cordoned"]


async def test_a_gpu_that_is_broken_at_the_first_start_is_reported_everywhere_until_it_is_healthy(folder: Path) -> None:
    async with stage(folder) as node:
        node.control.lose_gpu(1)
        await node.start_agent()
        await until(lambda: condition(node).get("message") == LOST)
        assert (condition(node)["status"], condition(node)["reason"]) == ("True", "GpuUnhealthy")
        await until(lambda: events(node, "GpuNotReadable") == [LOST])
        state = await asked(node, "/api/state")
        assert [(entry["code"], entry["why"]) for entry in state["history"]] == [("not_readable", LOST)]
        assert "gpumgr_gpus_not_readable 1\n" in await asked(node, "/metrics")
        node.control.restore_gpu(1)
        await until(lambda: condition(node)["status"] == "False")
        await until_shown(node, "gpumgr_gpus_not_readable 0\n")
