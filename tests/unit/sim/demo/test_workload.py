"""How the demo's containers sway: within their grant, differently from one another, and the same at every showing."""

import asyncio
from unittest.mock import AsyncMock, MagicMock

import pytest

from gpumgr.common.aio import finish_shielded
from gpumgr.sim.demo.workload import Activity, use_at

GRANT_BYTES = 5 << 30
NAMES = [f"pod-{number}" for number in range(50)]


def series(name: str, noise: float = 0.0) -> list[tuple[int, int]]:
    return [use_at(name, tick, memory_bytes=GRANT_BYTES, cores=40, noise=noise) for tick in range(120)]


@pytest.mark.parametrize("noise", [-0.02, 0.02])
def test_no_container_exceeds_its_grant(noise: float) -> None:
    for name in NAMES:
        for memory_bytes, percent in series(name, noise):
            assert 0 < memory_bytes <= GRANT_BYTES
            assert 1 <= percent <= 40


def test_the_use_of_every_container_changes_in_its_own_way_from_the_load_of_its_model_on() -> None:
    for name in NAMES:
        memory, percents = zip(*series(name), strict=True)
        assert memory[0] < memory[1] < memory[2] < memory[3]
        assert max(memory) - min(memory[4:]) > GRANT_BYTES // 20
        assert len(set(percents)) > 5
    assert len({tuple(series(name)) for name in NAMES}) == len(NAMES)


async def test_an_admission_that_runs_when_the_activity_is_cancelled_goes_on_to_its_end() -> None:
    """Else the agent has granted what the kubelet has not recorded, and the last step finds that they disagree."""
    called, answered, admitted = asyncio.Event(), asyncio.Event(), list[object]()

    async def run(pod: object) -> None:
        called.set()
        await answered.wait()
        admitted.append(pod)

    node = MagicMock(run=run, agent_log=AsyncMock(), pods={0: MagicMock(), 1: MagicMock()})
    for pod, name in zip(node.pods.values(), ("a", "patient"), strict=True):
        pod.name = name
    activity = asyncio.create_task(Activity(node, MagicMock(), round_seconds=0).run())
    await called.wait()
    activity.cancel()
    await asyncio.wait([activity])
    answered.set()
    assert await finish_shielded(10)
    assert admitted == [node.pod.return_value]
