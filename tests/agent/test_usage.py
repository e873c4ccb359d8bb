"""Who uses what: the real agent, with the driver, the processes and the container runtime of the simulated node."""

from pathlib import Path
from typing import Final

from gpumgr.sim.demo.node import SimulatedNode
from tests.background import until

from .stage import app, run, running

MIB = 1 << 20
#: (pod, container) -> bytes over all its GPUs
Told = dict[tuple[str, str], float]
QUICK: Final = {"nvml": {"sample_period_seconds": 0.1}}


async def until_reported(node: SimulatedNode, expected: Told) -> None:
    """The metrics say exactly this of all containers."""

    async def reported() -> bool:
        return await summed(node) == expected

    await until(reported)


async def summed(node: SimulatedNode) -> Told:
    told: Told = {}
    for (pod, container, _), used in (await node.memory_used()).items():
        told[pod, container] = told.get((pod, container), 0) + used
    return told


async def test_memory_is_attributed_to_the_pod_of_the_process(folder: Path) -> None:
    async with running(folder, settings=QUICK) as node:
        first, second = await run(node, "first", app(30, 4)), await run(node, "second", app(20, 4), app(10, 2, "side"))
        whole = await run(node, "whole", app(200))
        node.use(first, memory_bytes=700 * MIB, sm_percent=20)
        node.use(second, "side", memory_bytes=300 * MIB, sm_percent=5)
        node.use(whole, memory_bytes=2000 * MIB, sm_percent=80)
        mine = {("first", "main"): 700.0 * MIB, ("second", "main"): 0.0, ("second", "side"): 300.0 * MIB}
        await until_reported(node, mine | {("whole", "main"): 4000.0 * MIB})

        node.delete(whole)
        await node.restart_container(first)
        await until_reported(node, mine | {("first", "main"): 0.0})
        node.use(first, memory_bytes=600 * MIB)
        await until_reported(node, mine | {("first", "main"): 600.0 * MIB})
        assert not node.agent_log.find("gpu_process_unattributed")
        assert not node.agent_log.find("gpu_quarantined")
