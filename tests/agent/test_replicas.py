"""The whole agent with HAMi's resources under another name: restarts, another plugin in the way, the history and the metrics."""

from pathlib import Path

import pytest

from gpumgr.common.units import CORE_RESOURCE, Amounts
from gpumgr.sim.kubelet import SimContainer
from tests.component.cli.examination.conftest import listening

from .stage import RUNNER, app, introduce, running, stage

VGPU = "acme.com/vgpu"
BOTH = {"GPUMGR_NODE_PROFILE": "both", "GPUMGR_HAMI_COUNT_RESOURCE": VGPU, "GPUMGR_HAMI_DEVICE_MEMORY_SCALING": "2"}


def vgpu(name: str = "main", gpus: int = 1, **amounts: int) -> SimContainer:
    return SimContainer(name=name, others=((VGPU, gpus), *((f"nvidia.com/{key}", number) for key, number in amounts.items())))


async def test_pods_keep_their_replicas_over_restarts_and_a_lost_ledger(folder: Path) -> None:
    async with running(folder, environ=BOTH) as node:
        pods = [
            node.pod("vcuda", app(30, 4)),
            node.pod("a", vgpu(gpumem=1001)),
            node.pod("b", vgpu(gpus=2, gpumem=600, gpucores=10)),
        ]
        for pod in pods:
            assert (await node.run(pod)).phase == "Running"
        before = node.ledger()
        (a,) = before.of(None, pods[1].uid)
        ((gpu, counted),) = a.gpus.items()
        assert (counted, a.limits[gpu]) == (Amounts(0, 501), Amounts(0, 1001))
        (line,) = node.agent_log.find("gpus_oversubscribed")
        assert line["memory_scaling"] == 2
        assert VGPU in {dict(labels).get("resource") for _, labels in await node.metrics()}
        for lost in (False, True):
            await node.agent.kill()
            if lost:
                for file in (folder / "checkpoint").iterdir():
                    file.unlink()
            await node.start_agent(BOTH)
            await node.kubelet.until_allocatable(VGPU)
            after = node.ledger()
            assert {key: (each.gpus, each.limits, each.device_ids) for key, each in after.allocations.items()} == {
                key: (each.gpus, each.limits, each.device_ids) for key, each in before.allocations.items()
            }
            for pod in pods:
                await node.kubelet.start_container(pod, "main")
        assert (await node.run(node.pod("c", vgpu(gpumem=100)))).phase == "Running"


async def test_nothing_is_registered_while_another_plugin_has_the_gpus(folder: Path) -> None:
    async with stage(folder) as node:
        with listening(node.kubelet.plugin_folder / "nvidia-gpu.sock"):
            await node.agent.start(BOTH)
            await node.agent.while_running(node.agent_log.until("registration_waits"))
            assert CORE_RESOURCE not in node.kubelet.node_status()
        await node.until_offered()
        await node.kubelet.until_allocatable(VGPU)


@pytest.mark.parametrize("step", ["before_commit:1", "after_commit_before_answer:1"])
async def test_a_kill_at_the_commit_leaves_nothing_behind(folder: Path, step: str) -> None:
    async with running(folder, environ=BOTH | {"DIE_AT": step}, command=RUNNER) as node:
        victim = node.pod("victim", vgpu(gpumem=7000))
        await introduce(node, victim)
        assert (await node.kubelet.admit(victim)).phase == "Failed"
        committed = node.ledger().of(None, victim.uid)
        assert bool(committed) == step.startswith("after")
        began = len(node.agent_log.lines)
        await node.start_agent(BOTH)
        await node.kubelet.until_allocatable(VGPU)
        node.set_status(victim, node.kubelet.statuses[victim.uid])
        if committed:
            await node.agent_log.until("allocation_freed", since=began)
        again = [node.pod(f"again-{number}", vgpu(gpumem=7000)) for number in range(4)]
        for pod in again:
            assert (await node.run(pod)).phase == "Running"
