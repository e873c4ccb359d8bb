"""The whole agent with HAMi's resources under another name: restarts, another plugin in the way, the history and the metrics."""

from pathlib import Path

from gpumgr.common.units import Amounts
from gpumgr.sim.kubelet import SimContainer

from .stage import app, essence, lose_ledger, run, running

VGPU = "acme.com/vgpu"
BOTH = {"GPUMGR_NODE_PROFILE": "both", "GPUMGR_HAMI_COUNT_RESOURCE": VGPU, "GPUMGR_HAMI_DEVICE_MEMORY_SCALING": "2"}


def vgpu(name: str = "main", gpus: int = 1, **amounts: int) -> SimContainer:
    return SimContainer(name=name, others=((VGPU, gpus), *((f"nvidia.com/{key}", number) for key, number in amounts.items())))


async def test_pods_keep_their_replicas_over_restarts_and_a_lost_ledger(folder: Path) -> None:
    async with running(folder, environ=BOTH) as node:
        specs = {"vcuda": app(30, 4), "a": vgpu(gpumem=1001), "b": vgpu(gpus=2, gpumem=600, gpucores=10)}
        pods = [await run(node, name, container) for name, container in specs.items()]
        before = node.ledger()
        (a,) = before.of(None, pods[1].uid)
        ((gpu, counted),) = a.gpus.items()
        assert (counted, a.limits[gpu]) == (Amounts(0, 501), Amounts(0, 1001))
        assert VGPU in {dict(labels).get("resource") for _, labels in await node.metrics()}
        for lost in (False, True):
            await (lose_ledger(node) if lost else node.agent.kill())
            await node.start_agent(BOTH)
            await node.kubelet.until_allocatable(VGPU)
            assert essence(node.ledger()) == essence(before)
            for pod in pods:
                await node.kubelet.start_container(pod, "main")
        await run(node, "c", vgpu(gpumem=100))
