"""Reset of one GPU while the monitor runs: the monitor closes NVML for that time, which does not count as an outage."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumgr.common.errors import NvmlError
from gpumgr.driver.driver import Nvml
from gpumgr.driver.monitor import Monitor
from gpumgr.driver.programs import reset_gpu
from gpumgr.sim.control import SimProcess
from gpumgr.sim.library import SimNode

from .conftest import Prepare, watched
from .smi import install_smi

WELL = ("healthy", None)
MIB = 1 << 20

Smi = Callable[[SimNode], str]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    def install(sim: SimNode) -> str:
        monkeypatch.setenv("FAKE_SMI_NODE", str(sim.sysfs_root.parent))
        return install_smi(tmp_path)

    return install


async def cordon(monitor: Monitor, uuid: str) -> None:
    monitor.cordon(uuid, "broken fan")
    await monitor.publish_health()


async def test_a_reset_repairs_the_gpu_and_later_events_are_received(node: Prepare, smi: Smi) -> None:
    sim = node("pcie-a10-4")
    sim.control.lose_gpu(2)
    uuid = sim.description.uuid_of(2)
    async with watched(sim) as (monitor, listener):
        await listener.rounds(1)
        assert await monitor.processes(uuid) is None
        await cordon(monitor, uuid)
        said = await reset_gpu(monitor, uuid, program=smi(sim))
        assert said.splitlines()[1:] == ["All done."]
        await listener.until(lambda: len(listener.snapshots[-1].gpus) == 4)
        await listener.until(lambda: monitor.health[uuid].effective_reason == "operator")
        monitor.uncordon(uuid)
        await listener.until(lambda: monitor.health[uuid].state == "healthy")
        sim.control.xid(3, 119)
        await listener.until(lambda: monitor.health[sim.description.uuid_of(3)].reason == "xid")
    assert listener.outages == []


async def test_while_the_driver_is_closed_for_a_reset_health_is_unchanged_and_calls_wait(
    mixed: SimNode, smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("FAKE_SMI_GATE", str(gate))
    kept: list[Nvml] = []

    class Kept(Nvml):
        async def open(self) -> None:
            kept[:] = [self]
            await super().open()

    async with watched(mixed, kind=Kept) as (monitor, listener):
        await listener.rounds(1)
        uuid = mixed.description.uuid_of(1)
        await cordon(monitor, uuid)
        before = monitor.health
        reset = asyncio.create_task(reset_gpu(monitor, uuid, program=smi(mixed)))
        while not gate.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.01)
        told, samples, errors = len(listener.history), len(listener.samples), kept[0].call_errors
        waiting = [asyncio.create_task(kept[0].compute_mode(uuid)), asyncio.create_task(monitor.processes(uuid))]
        done, _ = await asyncio.wait([reset, *waiting], timeout=0.1)
        assert not done
        assert (monitor.health, len(listener.history), len(listener.samples)) == (before, told, samples)
        gate.unlink()
        assert "successfully reset" in await reset
        assert await asyncio.gather(*waiting) == [0, ()]
        await listener.rounds(2)
        assert listener.states == [WELL, ("healthy", "operator")]
        assert kept[0].call_errors == errors
    assert listener.outages == []
    assert len(listener.snapshots) == 2


async def test_the_programs_refusal_is_reported_verbatim(mixed: SimNode, smi: Smi) -> None:
    uuid = mixed.description.uuid_of(0)
    mixed.control.set_processes(0, [SimProcess(pid=7, memory_bytes=3 * MIB)])
    async with watched(mixed) as (monitor, listener):
        await listener.rounds(1)
        processes = await monitor.processes(uuid)
        assert [(process.pid, process.memory_bytes) for process in processes or ()] == [(7, 3 * MIB)]
        with pytest.raises(NvmlError) as refusal:
            await reset_gpu(monitor, uuid, program=smi(mixed))
        text = str(refusal.value)
        assert "(exit code 255): The following GPUs could not be reset:\n" in text
        assert f"{mixed.description.gpus[0].bus_id}: in use by another client\n\n1 device is currently" in text.lower()
        assert f"-pm 0 -i {uuid}" in text
        await listener.rounds(2)
        assert listener.states == [WELL, WELL]
    assert listener.outages == []


async def test_a_program_that_is_missing_or_does_not_end_is_an_error_only(
    mixed: SimNode, smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = mixed.description.uuid_of(0)
    monkeypatch.setenv("FAKE_SMI_GATE", str(tmp_path / "gate"))
    async with watched(mixed) as (monitor, listener):
        await listener.rounds(1)
        with pytest.raises(NvmlError, match=r"nowhere is not in PATH.*nvml\.smi_program"):
            await reset_gpu(monitor, uuid, program=str(tmp_path / "nowhere"))
        with pytest.raises(NvmlError, match=r"did not end within 0\.3 s and was killed"):
            await reset_gpu(monitor, uuid, program=smi(mixed), timeout_seconds=0.3)
        await listener.rounds(2)
        assert listener.states == [WELL, WELL]
    assert listener.outages == []


async def test_a_gpu_cordoned_before_its_detection_is_cordoned_in_the_first_report(mixed: SimNode) -> None:
    mixed.control.unload_driver()
    uuid = mixed.description.uuid_of(1)
    async with watched(mixed) as (monitor, listener):
        await listener.until(lambda: bool(listener.outages))
        monitor.cordon(uuid, "broken fan")
        mixed.control.load_driver()
        await listener.rounds(1)
        first = listener.history[0][uuid]
        assert (first.cordon_reason, first.effective_reason, first.offered) == ("broken fan", "operator", False)
        monitor.uncordon(uuid)
        await listener.until(lambda: listener.states == [WELL, WELL])
