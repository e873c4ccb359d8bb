"""Cordons and resets on a simulated node: the monitor, the books and a checkpoint on a disk, over a kill of the agent."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumgr.agent.device_lists import DeviceListPublisher
from gpumgr.agent.maintenance import Maintenance, MaintenanceRequest
from gpumgr.agent.state import AgentState
from gpumgr.allocator.node_devices import NodeDevices
from gpumgr.app.hardware_events import HardwareEvents
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.nvml.driver import Nvml
from gpumgr.nvml.health import GpuHealth
from gpumgr.nvml.monitor import Monitor
from gpumgr.nvml.reset import reset_gpu
from gpumgr.proc import HostProcesses
from gpumgr.sim.library import SimNode
from tests.component.stage.stage import Drift, MemoryPods

from .conftest import PERIOD_SECONDS, RETRY_SECONDS, Prepare
from .smi import install_smi


class RecordedEvents(HardwareEvents):
    """Records the reported health of the GPUs."""

    history: list[Mapping[str, GpuHealth]]

    async def health_changed(self, health: Mapping[str, GpuHealth]) -> None:
        self.history.append(health)
        await super().health_changed(health)


class Incarnation:
    """One run of an agent, from its checkpoint to a kill."""

    def __init__(self, sim: SimNode, checkpoint: SqliteCheckpoint, program: str) -> None:
        loaded = checkpoint.load()
        processes = HostProcesses()
        self.device_lists: list[NodeDevices] = []
        self._device_lists = DeviceListPublisher(self.device_lists.append, clock=time.monotonic)
        self.agent_state = AgentState(
            loaded.ledger,
            checkpoint=checkpoint,
            device_lists=self._device_lists,
            meter=Drift(),
            runs=processes.runs,
            policy="binpack",
            clock=time.monotonic,
        )
        self.hardware_events = RecordedEvents(
            self.agent_state,
            processes,
            device_root=None,
            before_snapshot=lambda _snapshot: asyncio.sleep(0),
            on_sample=lambda _sample, _started: asyncio.sleep(0),
        )
        self.hardware_events.history = []
        nvml = Nvml(library_path=sim.library_path, sysfs_root=sim.sysfs_root)
        self.monitor = Monitor(nvml, self.hardware_events, sample_period_seconds=PERIOD_SECONDS, retry_seconds=RETRY_SECONDS)
        self.maintenance = Maintenance(
            agent_state=self.agent_state,
            health=self.monitor,
            checkpoint=checkpoint,
            pods=MemoryPods(),
            publisher=None,
            reset=lambda uuid: reset_gpu(self.monitor, uuid, program=program),
        )
        self.maintenance.restore(loaded.notes)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.monitor.run())
        try:
            await self.hardware_events.known.wait()
            self.agent_state.publish()
            self._device_lists.start()
            yield
        finally:
            self._device_lists.close()
            task.cancel()
            await asyncio.wait([task])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (the monitor runs at its own pace)
                await asyncio.sleep(PERIOD_SECONDS)


async def test_a_broken_gpu_is_cordoned_also_after_a_kill_and_healthy_after_a_reset(
    node: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = node("pcie-a10-4")
    program = install_smi(tmp_path, sim, monkeypatch)
    uuid = sim.description.uuid_of(2)
    killed = SqliteCheckpoint.open(tmp_path / "checkpoint")
    first = Incarnation(sim, killed, program)
    async with first.run():
        await first.maintenance.execute(MaintenanceRequest(action="cordon", gpu="2", reason="falls off the bus"))
        name = first.agent_state.ledger.gpu_registry.by_uuid[uuid].name
        closed = {name: "cordoned by the operator: falls off the bus"}
        assert first.agent_state.node().unschedulable == closed
    sim.control.lose_gpu(2)
    again = SqliteCheckpoint.open(tmp_path / "checkpoint")  # without a close: the disk has what was confirmed
    second = Incarnation(sim, again, program)
    async with second.run():
        assert not any(
            each.healthy_cores for node_devices in second.device_lists for each in node_devices if each.gpu.name == name
        )
        answer = await second.maintenance.execute(MaintenanceRequest(action="reset", gpu=uuid))
        assert "successfully reset" in answer["said"]
        await second.until(lambda: second.agent_state.node().unschedulable == closed)
        cordoned = len(second.hardware_events.history)
        await second.maintenance.execute(MaintenanceRequest(action="uncordon", gpu="GPU2"))
        await second.until(lambda: not second.agent_state.node().unschedulable)
        assert "probation" in {health[uuid].state for health in second.hardware_events.history[cordoned:]}, (
            "it is watched for a while first"
        )
    assert [entry.code for entry in second.agent_state.history.entries()] == ["not_readable", "reset", "uncordoned"]
    after = SqliteCheckpoint.open(tmp_path / "checkpoint")
    assert after.load().notes["cordons"] == "{}"
    for checkpoint in (killed, again, after):
        await checkpoint.close()
