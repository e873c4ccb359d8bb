"""What the GPUs do and how they are, through the real binding and the simulated library."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gpumgr.driver.driver import Nvml
from gpumgr.driver.health import DoubleBitError, Failed, HealthReading, Observation, Xid
from gpumgr.driver.session import EventThread
from gpumgr.placement.devices import GpuProcess, GpuSample
from gpumgr.sim import library
from gpumgr.sim.control import SimLoad, SimProcess
from gpumgr.sim.library import SimNode

from .conftest import Prepare, opened

MIB = 1024 * 1024
_NEWER_CALL: Final = Path(__file__).parents[2] / "data/nvml/processes_utilization.c"


async def first_sample(nvml: Nvml, *, utilization: bool = False) -> GpuSample:
    (sample, *_) = (await nvml.read(utilization=utilization)).sample.gpus.values()
    return sample


async def busy(nvml: Nvml) -> dict[int, float | None]:
    """Process -> its utilization of GPU 0."""
    processes = (await first_sample(nvml, utilization=True)).processes
    return {process.pid: process.utilization_ratio for process in processes or ()}


async def test_an_idle_gpu(node: Prepare) -> None:
    async with opened(node("hgx-h100-8")) as nvml:
        sample = await first_sample(nvml)
    assert sample == GpuSample(
        uuid=sample.uuid,
        memory_used_bytes=0,
        memory_reserved_bytes=551 * MIB,
        utilization_ratio=0.0,
        memory_copy_ratio=0.0,
        temperature_celsius=32.0,
        power_watts=70.0,
        processes=(),
    )


async def test_scripted_work(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    processes = (SimProcess(pid=20, memory_bytes=300 * MIB, sm_percent=80), SimProcess(pid=3, memory_bytes=None))
    SimLoad(sim.control, sim.description).put([(0, process) for process in processes])
    async with opened(sim) as nvml:
        sample = await first_sample(nvml)
        assert sample.processes == (GpuProcess(pid=3, memory_bytes=None), GpuProcess(pid=20, memory_bytes=300 * MIB))
        assert (sample.utilization_ratio, sample.memory_copy_ratio) == (0.8, 0.4)
        assert (sample.temperature_celsius, sample.power_watts) == (65.0, 574.0)
        assert sample.memory_used_bytes == 300 * MIB
        sim.control.set_memory_used(0, 1000 * MIB)
        assert (await first_sample(nvml)).memory_used_bytes == 1000 * MIB


async def test_an_old_driver_lists_processes_and_counts_reserved_memory_as_used(node: Prepare) -> None:
    sim = node("pcie-p40-7")
    sim.control.set_processes(0, [SimProcess(pid=20, memory_bytes=300 * MIB)])
    async with opened(sim) as nvml:
        sample = await first_sample(nvml)
    assert sample.processes == (GpuProcess(pid=20, memory_bytes=300 * MIB),)
    assert (sample.memory_used_bytes, sample.memory_reserved_bytes) == (428 * MIB, None)
    assert sample.temperature_celsius == 24.0


async def test_values_that_a_driver_does_not_report_are_unknown(mixed: SimNode, nvml: Nvml) -> None:
    for function, code in (
        ("nvmlDeviceGetUtilizationRates", 3),
        ("nvmlDeviceGetTemperature", 3),
        ("nvmlDeviceGetTemperatureV", 25),
        ("nvmlDeviceGetPowerUsage", 3),
        ("nvmlDeviceGetMemoryInfo", 3),
        ("nvmlDeviceGetMemoryInfo_v2", 3),
        ("nvmlDeviceGetComputeRunningProcesses_v2", 13),
        ("nvmlDeviceGetComputeRunningProcesses_v3", 13),
    ):
        mixed.control.set_result(function, code, gpu=0)
    await nvml.read()
    assert (await nvml.read()).sample.gpus[mixed.description.uuid_of(0)] == GpuSample(uuid=mixed.description.uuid_of(0))


@pytest.mark.peer_bug("B38: it reads at most 64 processes of a GPU")
async def test_processes_that_start_between_size_and_fetch_are_fetched_again(mixed: SimNode, nvml: Nvml) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20)])
    mixed.control.grow_processes(0, 100)
    processes = (await first_sample(nvml)).processes
    assert processes is not None
    assert len(processes) == 101


@pytest.mark.parametrize("code", [999, 6])
@pytest.mark.parametrize(
    ("function", "unknown"),
    [
        ("nvmlDeviceGetPowerUsage", {"power_watts"}),
        ("nvmlDeviceGetTemperatureV", {"temperature_celsius"}),
        ("nvmlDeviceGetUtilizationRates", {"utilization_ratio", "memory_copy_ratio"}),
        ("nvmlDeviceGetMemoryInfo_v2", {"memory_used_bytes", "memory_reserved_bytes"}),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", set()),
    ],
)
async def test_an_error_of_one_reading_costs_no_other(
    mixed: SimNode, nvml: Nvml, function: str, unknown: set[str], code: int
) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20, memory_bytes=300 * MIB, sm_percent=50)])
    good = await first_sample(nvml, utilization=True)
    mixed.control.set_result(function, code, gpu=0)
    sample = (await nvml.read(utilization=True)).sample
    assert good.processes == (GpuProcess(pid=20, memory_bytes=300 * MIB, utilization_ratio=0.5),)
    assert (sample.failures, sample.gpus[good.uuid]) == ({}, replace(good, **dict[str, Any].fromkeys(unknown)))


async def test_processes_are_unknown_where_their_list_fails(mixed: SimNode, nvml: Nvml) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20, memory_bytes=300 * MIB)])
    mixed.control.set_result("nvmlDeviceGetComputeRunningProcesses_v3", 999, gpu=0)
    sample = await first_sample(nvml)
    assert (sample.processes, sample.memory_used_bytes, sample.power_watts) == (None, 300 * MIB, 34.0)
    mixed.control.set_result("nvmlDeviceGetComputeRunningProcesses_v3", 0, gpu=0)
    mixed.control.set_result("nvmlDeviceGetGraphicsRunningProcesses_v3", 999, gpu=0)
    assert await nvml.processes(sample.uuid) is None, "what needs all processes does not rely on a part of them"


@pytest.mark.parametrize("function", ["*", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetGraphicsRunningProcesses_v3"])
async def test_a_lost_gpu_is_missing_from_a_sample_alone(node: Prepare, function: str) -> None:
    """Also one that is lost between two readings."""
    sim = node("pcie-a10-4")
    uuids = [sim.description.uuid_of(index) for index in range(4)]
    async with opened(sim) as nvml:
        await nvml.snapshot()
        sim.control.set_result(function, 15, gpu=1)
        sample = (await nvml.read()).sample
    assert set(sample.gpus) == {uuids[0], uuids[2], uuids[3]}
    assert sample.failures.keys() == {uuids[1]}
    assert "NVML error 15" in sample.failures[uuids[1]]


async def test_the_utilization_of_clients_of_an_mps_server_is_unknown(mixed: SimNode, nvml: Nvml) -> None:
    """The driver reports it as the server's."""
    client = SimProcess(pid=20, memory_bytes=300 * MIB, sm_percent=50)
    mixed.control.set_processes(0, [client, SimProcess(pid=3), SimProcess(pid=4, sm_percent=7)])
    mixed.control.start_mps_server(0, 10)
    mixed.control.attach_mps_client(0, 20, 10)
    assert await busy(nvml) == {3: 0.0, 4: 0.07, 10: 0.5, 20: None}
    mixed.control.set_result("nvmlDeviceGetMPSComputeRunningProcesses_v3", 999, gpu=0)
    assert await busy(nvml) == {3: None, 4: 0.07, 10: 0.5, 20: None}, "any process without a sample may be a client"
    mixed.control.set_result("nvmlDeviceGetMPSComputeRunningProcesses_v3", 0, gpu=0)
    mixed.control.end_mps(10)
    assert await busy(nvml) == {3: 0.0, 4: 0.07, 20: 0.5}


@pytest.mark.parametrize("error", [3, 26], ids=["not supported", "deprecated"])
async def test_utilization_by_the_newer_call_where_the_older_has_gone(
    node: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(library._SOURCE.read_text() + _NEWER_CALL.read_text())
    monkeypatch.setattr(library, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sim = node("hgx-h100-8")
    sim.control.set_result("nvmlDeviceGetProcessUtilization", error)
    async with opened(sim) as nvml:
        assert await busy(nvml) == {}
        sim.control.set_processes(0, [SimProcess(pid=3)])
        assert await busy(nvml) == {3: 0.0}
        sim.control.set_processes(0, [SimProcess(pid=3), *(SimProcess(pid=pid, sm_percent=pid) for pid in (30, 60))])
        assert await busy(nvml) == {3: 0.0, 30: 0.3, 60: 0.6}
        assert nvml.call_errors == {}, "that nothing ran is no failure"
        sim.control.set_result("nvmlDeviceGetProcessesUtilizationInfo", 3)
        assert await busy(nvml) == {3: None, 30: None, 60: None}


async def test_how_busy_each_process_keeps_its_gpu(mixed: SimNode, nvml: Nvml) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20, memory_bytes=MIB, sm_percent=35), SimProcess(pid=3, sm_percent=0)])
    assert await busy(nvml) == {3: 0.0, 20: 0.35}
    mixed.control.set_processes(0, [SimProcess(pid=20, memory_bytes=MIB, sm_percent=80)])
    assert await busy(nvml) == {20: 0.8}
    assert (await first_sample(nvml)).processes == (GpuProcess(pid=20, memory_bytes=MIB),)


async def test_no_samples_are_no_error_and_mean_idle(mixed: SimNode, nvml: Nvml) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20, sm_percent=35)])
    mixed.control.set_result("nvmlDeviceGetProcessUtilization", 6)
    assert await busy(nvml) == {20: 0.0}
    mixed.control.set_processes(0, [SimProcess(pid=20)])
    mixed.control.set_result("nvmlDeviceGetProcessUtilization", 0)
    assert await busy(nvml) == {20: 0.0}
    assert nvml.call_errors == {}


@pytest.mark.parametrize("code", [3, 13, 7, 999])
async def test_utilization_that_the_driver_lacks_does_not_affect_the_rest(mixed: SimNode, nvml: Nvml, code: int) -> None:
    mixed.control.set_processes(0, [SimProcess(pid=20, memory_bytes=MIB, sm_percent=35)])
    mixed.control.set_result("nvmlDeviceGetProcessUtilization", code)
    assert (await first_sample(nvml, utilization=True)).processes == (GpuProcess(pid=20, memory_bytes=MIB),)


async def test_looks(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    uuids = [sim.description.uuid_of(index) for index in range(8)]
    async with opened(sim) as nvml:
        await nvml.snapshot()
        sim.control.lose_gpu(0)
        sim.control.set_result("nvmlDeviceGetMemoryInfo", 16, gpu=1)
        sim.control.set_result("nvmlDeviceGetMemoryInfo", 999, gpu=2)
        sim.control.set_mig(3, enabled=True)
        sim.control.double_bit_error(4, count=2)
        sim.control.set_recovery_action(5, 4)
        sim.control.set_result("nvmlDeviceGetFieldValues", 13, gpu=6)
        sim.control.set_result("nvmlDeviceGetTotalEccErrors", 3, gpu=6)
        looks = (await nvml.read()).health
    faults = [look.reason for look in (looks[uuid] for uuid in uuids[:3]) if isinstance(look, Failed)]
    assert faults == ["lost", "reset", "error"]
    well = HealthReading(mig_enabled=False, double_bit_errors=0, recovery_action=0)
    assert [looks[uuid] for uuid in uuids[3:]] == [
        HealthReading(mig_enabled=True, double_bit_errors=0, recovery_action=0),
        HealthReading(mig_enabled=False, double_bit_errors=2, recovery_action=0),
        HealthReading(mig_enabled=False, double_bit_errors=0, recovery_action=4),
        HealthReading(mig_enabled=False, double_bit_errors=None, recovery_action=None),
        well,
    ]


class Events:
    """What was reported, to be awaited one by one."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str | None, Observation]] = asyncio.Queue()

    def __call__(self, uuid: str | None, event: Xid | DoubleBitError) -> None:
        self.queue.put_nowait((uuid, event))

    async def next(self) -> tuple[str | None, Observation]:
        async with asyncio.timeout(20):
            return await self.queue.get()


async def test_events_are_delivered_once_and_old_ones_never(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    uuids = [sim.description.uuid_of(index) for index in range(8)]
    sim.control.xid(0, 13)
    events = Events()
    async with opened(sim) as nvml:
        await nvml.snapshot()
        assert await nvml.watch_events(events) == frozenset()
        sim.control.xid(3, 79)
        sim.control.double_bit_error(5)
        assert [await events.next(), await events.next()] == [(uuids[3], Xid(number=79)), (uuids[5], DoubleBitError())]
        await nvml.watch_events(events)
        sim.control.xid(7, 31)
        assert await events.next() == (uuids[7], Xid(number=31))
    assert events.queue.empty()


async def test_gpus_without_events_are_named(node: Prepare) -> None:
    sim = node("pcie-a10-4")
    uuids = [sim.description.uuid_of(index) for index in range(4)]
    events = Events()
    async with opened(sim) as nvml:
        await nvml.snapshot()
        sim.control.set_result("nvmlDeviceRegisterEvents", 3, gpu=0)
        sim.control.set_result("nvmlDeviceRegisterEvents", 999, gpu=1)
        assert await nvml.watch_events(events) == {uuids[0], uuids[1]}
        sim.control.xid(2, 48)
        assert await events.next() == (uuids[2], Xid(number=48))
        sim.control.set_result("nvmlEventSetCreate", 13)
        assert await nvml.watch_events(events) == set(uuids)


async def test_another_programs_turn_waits_for_a_slow_event_thread(mixed: SimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.driver.session._STOP_SECONDS", 0.0)  # all the time that an agent has at its end
    async with opened(mixed) as nvml:
        await nvml.snapshot()
        await nvml.watch_events(Events())
        async with nvml.without_session():
            assert not nvml.opened
        assert nvml.opened


async def test_another_programs_turn_gives_the_event_thread_no_less_time_than_the_agents_end(
    node: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the limit for calls is short."""
    limits = []
    stop = EventThread.stop

    async def noted(thread: EventThread, *, timeout_seconds: float) -> bool:
        limits.append(timeout_seconds)
        return await stop(thread, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(EventThread, "stop", noted)
    monkeypatch.setattr("gpumgr.driver.session._STOP_SECONDS", 60.0)
    async with opened(node("mixed-2")) as nvml:
        await nvml.snapshot()
        await nvml.watch_events(Events())
        async with nvml.without_session():
            assert limits == [60.0]


async def test_errors_of_the_wait_are_waited_out(mixed: SimNode, nvml: Nvml) -> None:
    events = Events()
    mixed.control.set_result("nvmlEventSetWait_v2", 999)
    await nvml.snapshot()
    await nvml.watch_events(events)
    mixed.control.set_result("nvmlEventSetWait_v2", 0)
    mixed.control.xid(1, 94)
    assert await events.next() == (mixed.description.uuid_of(1), Xid(number=94))
