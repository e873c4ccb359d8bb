"""The monitor over a simulated node: faults are detected, reported, and end."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import structlog.testing

from gpumgr.common.files import replace_file
from gpumgr.driver.driver import Nvml
from gpumgr.driver.health import HealthRules
from gpumgr.driver.snapshot import read_pci_gpus
from gpumgr.placement.devices import MigInstance
from gpumgr.sim.control import SimControl, SimProcess
from gpumgr.sim.library import SimNode, prepare

from .conftest import PERIOD_SECONDS, Prepare, watched

WELL = ("healthy", None)


#: Reason -> the fault of GPU 1, which `on` begins or ends.
FAULTS: dict[str, Callable[[SimControl, bool], None]] = {
    "lost": lambda control, on: control.lose_gpu(1) if on else control.restore_gpu(1),
    "reset": lambda control, on: control.set_result("nvmlDeviceGetMemoryInfo", 16 * on, gpu=1),
    "error": lambda control, on: control.set_result("nvmlDeviceGetMemoryInfo", 999 * on, gpu=1),
    "mig": lambda control, on: control.set_mig(1, enabled=on),
}


@pytest.mark.parametrize("reason", FAULTS)
async def test_a_fault_marks_one_gpu_until_it_is_gone(node: Prepare, reason: str) -> None:
    sim = node("hgx-h100-8")
    async with watched(sim) as (monitor, listener):
        await listener.rounds(3)
        assert listener.states == [WELL] * 8
        assert listener.history == [monitor.health]
        assert all(len(sample.gpus) == 8 and not sample.failures for sample in listener.samples)
        FAULTS[reason](sim.control, True)
        await listener.until(lambda: listener.states[1] == ("unhealthy", reason))
        await listener.rounds(3)
        assert listener.states == [WELL, ("unhealthy", reason), *[WELL] * 6]
        FAULTS[reason](sim.control, False)
        await listener.until(lambda: listener.states == [WELL] * 8)
    assert "probation" in {health[listener.snapshots[0].gpus[1].uuid].state for health in listener.history}
    assert (listener.outages, len(listener.snapshots)) == ([], 1)


async def test_a_shorter_period_counts_at_once(node: Prepare) -> None:
    async with watched(node("mixed-2"), sample_period_seconds=3600.0) as (monitor, listener):
        await listener.rounds(1)
        monitor.apply(rules=HealthRules(), sample_period_seconds=PERIOD_SECONDS)
        await listener.rounds(2)


async def test_an_xid_of_a_gpu_instance_concerns_its_mig_devices_alone(node: Prepare) -> None:
    sim = node("mig-4")
    gpu, devices = sim.description.uuid_of(2), sim.description.mig_instances_of(2)
    rules = HealthRules(good_readings=3)
    async with watched(sim, rules=rules) as (_, listener):
        await listener.rounds(1)
        sim.control.xid(2, 31, gpu_instance=devices[1].gpu_instance)  # an application's
        sim.control.xid(2, 95, gpu_instance=devices[1].gpu_instance)
        await listener.until(lambda: any(devices[1].uuid in health for health in listener.history))
        await listener.until(lambda: devices[1].uuid not in listener.health)
        sim.control.xid(2, 95)
        await listener.until(lambda: any(health[gpu].reason == "xid" for health in listener.history))
    known = {*map(sim.description.uuid_of, range(4)), devices[1].uuid}
    assert {uuid for health in listener.history for uuid in health} == known
    of_device = [health[devices[1].uuid] for health in listener.history if devices[1].uuid in health]
    assert of_device[0].message == "XID 95: uncontained memory error"
    assert {each.state for each in of_device} <= {"unhealthy", "probation"}
    assert {health[gpu].reason for health in listener.history} == {"mig", "xid"}
    others = (sim.description.uuid_of(index) for index in (0, 1, 3))
    assert {health[uuid].reason for uuid in others for health in listener.history} == {None, "mig"}


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues", "*"])
async def test_a_gpu_whose_calls_hang_goes_out_of_service_alone_until_they_return(
    node: Prepare, function: str, limits: dict[int | None, float]
) -> None:
    sim = node("hgx-h100-8")
    async with watched(sim) as (_, listener):
        await listener.rounds(1)
        limits[3] = 0.2
        sim.control.hang(function=function, gpu=3)
        await listener.until(lambda: listener.states[3] == ("unhealthy", "hang"))
        await listener.rounds(3)
        assert listener.states == [*[WELL] * 3, ("unhealthy", "hang"), *[WELL] * 4]
        assert len(listener.samples[-1].gpus) == 7
        sim.control.xid(5, 79)
        await listener.until(lambda: listener.states[5][1] == "xid")
        limits.clear()
        sim.control.release()
        await listener.until(lambda: listener.states == [WELL] * 8)
        sim.control.xid(3, 119)
        await listener.until(lambda: listener.states[3][1] == "xid")
    assert listener.outages == []


async def test_a_gpu_about_which_a_call_takes_long_keeps_its_health_and_the_others_are_watched(
    node: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of MIG may take half a minute."""
    monkeypatch.setattr("gpumgr.driver.driver._BUSY_SECONDS", 0.05)
    sim, release = node("pcie-a10-4"), threading.Event()
    async with watched(sim) as (monitor, listener):
        await listener.rounds(1)
        call = asyncio.create_task(monitor._nvml._worker.call(release.wait, timeout_seconds=60, gpu=0))
        try:
            await listener.until(lambda: len(listener.samples[-1].gpus) == 3)
            sim.control.set_result("nvmlDeviceGetMemoryInfo", 16, gpu=1)
            await listener.until(lambda: listener.states[1][1] == "reset")
            await listener.rounds(3)
            assert sim.description.uuid_of(0) not in {**listener.samples[-1].gpus, **listener.samples[-1].failures}
            assert listener.states == [WELL, ("unhealthy", "reset"), WELL, WELL]
        finally:
            release.set()
        await call
        await listener.until(lambda: len(listener.samples[-1].gpus) == 4)
    assert {health[sim.description.uuid_of(0)].state for health in listener.history} == {"healthy"}
    assert listener.outages == []


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceRegisterEvents", "*"])
async def test_a_gpu_that_hangs_from_the_start_joins_when_its_calls_return(
    node: Prepare, function: str, limits: dict[int | None, float]
) -> None:
    sim = node("pcie-a10-4")
    sim.control.hang(function=function, gpu=2)
    limits[2] = 0.2
    async with watched(sim) as (_, listener):
        await listener.rounds(2)
        assert listener.states.count(WELL) >= 3
        limits.clear()
        sim.control.release()
        await listener.until(lambda: len(listener.snapshots[-1].gpus) == 4)
        uuid = sim.description.uuid_of(2)
        await listener.until(lambda: listener.health[uuid].state == "healthy")
        sim.control.xid(2, 119)
        await listener.until(lambda: listener.health[uuid].reason == "xid")
    assert listener.outages == []


async def test_an_error_of_the_driver_is_recovered_from_while_a_gpu_hangs(node: Prepare, limits: dict[int | None, float]) -> None:
    """The session can't be closed under the call that hangs."""
    sim = node("pcie-a10-4")
    async with watched(sim) as (_, listener):
        await listener.rounds(1)
        limits[2] = 0.2
        sim.control.hang(gpu=2)
        await listener.until(lambda: listener.states[2][1] == "hang")
        limits.clear()
        sim.control.set_result("nvmlDeviceGetCount_v2", 999)
        await listener.until(lambda: bool(listener.outages))
        sim.control.set_result("nvmlDeviceGetCount_v2", 0)
        await listener.until(lambda: listener.states == [WELL, WELL, ("unhealthy", "hang"), WELL])
        sim.control.release()
        await listener.until(lambda: listener.states == [WELL] * 4)


async def test_a_change_of_mig_delays_a_snapshot_and_neither_samples_nor_health(
    node: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MIG device appears on GPU 1 while one is created on GPU 0."""
    monkeypatch.setattr("gpumgr.driver.driver._BUSY_SECONDS", 0.05)
    sim = node("hgx-h100-8")
    async with watched(sim) as (monitor, listener):
        await listener.rounds(1)
        (gpu, other), function = (
            [each.uuid for each in listener.snapshots[0].gpus[:2]],
            "nvmlDeviceCreateGpuInstanceWithPlacement",
        )
        profile = listener.snapshots[0].gpus[0].mig_profiles[0]
        for uuid in (gpu, other):
            await monitor._nvml.enable_mig(uuid)
        await listener.until(lambda: {listener.health[uuid].reason for uuid in (gpu, other)} == {"mig"})
        sim.control.hang(function=function, gpu=0)
        slow = asyncio.create_task(monitor._nvml.create_mig_instance(gpu, profile, profile.starts[0]))
        await asyncio.sleep(0)
        instance = MigInstance(uuid="MIG-1", profile="1g.10gb", gpu_instance=7, compute_instance=0, memory_bytes=5 << 30)
        sim.control.set_mig_instances(1, {0: instance})
        await listener.rounds(3)
        sim.control.lose_gpu(2)
        await listener.until(lambda: listener.states[2] == ("unhealthy", "lost"))
        shown = [[each.uuid for each in one.gpus[1].mig_instances] for one in listener.snapshots]
        assert shown == [[]] * len(shown)
        sim.control.release()
        await slow
        await listener.until(lambda: [each.uuid for each in listener.snapshots[-1].gpus[1].mig_instances] == ["MIG-1"])


async def test_an_absent_driver_is_waited_for_and_mentioned_once(mixed: SimNode) -> None:
    mixed.control.unload_driver()
    loads: list[None] = []
    tried_often = asyncio.Event()

    class Counted(Nvml):
        tries = 0

        async def open(self) -> None:
            self.tries += 1
            if self.tries == 5:
                tried_often.set()
            await super().open()

    async def load() -> bool:
        loads.append(None)
        return False

    with structlog.testing.capture_logs() as logs:
        async with watched(mixed, load_kernel_modules=load, kind=Counted) as (_, listener):
            await tried_often.wait()
            assert listener.snapshots == []
            mixed.control.load_driver()
            await listener.until(lambda: bool(listener.samples))
    assert listener.outages == ["the NVIDIA driver is not loaded (nvmlInit: NVML error 9)"]
    assert [line["event"] for line in logs].count("nvml_down") == 1
    assert len(loads) == 1


async def test_a_gpu_that_no_longer_is_listed_is_missing_and_one_that_comes_is_found(node: Prepare) -> None:
    sim = node("pcie-a10-4")
    folder = sim.sysfs_root.parent
    source = "about: two of four\ndriver_version: 535.183.01\ncuda_version: 12.2\n"
    source += "models: {a10: {model: NVIDIA A10, memory_mib: 23028}}\ngpus:\n"
    for index in range(2):
        gpu = sim.description.gpus[index]
        chain = ", ".join(gpu.pcie)
        source += f"  - {{model: a10, bus_id: {gpu.bus_id}, pcie: [{chain}], uuid: {sim.description.uuid_of(index)}}}\n"
    (folder / "two.yaml").write_text(source)
    async with watched(sim) as (_, listener):
        await listener.rounds(1)
        sim.control.unload_driver()
        prepare(str(folder / "two.yaml"), folder)
        sim.control.load_driver()
        await listener.until(lambda: listener.states == [WELL, WELL, ("unhealthy", "missing"), ("unhealthy", "missing")])
        assert len(listener.snapshots[-1].gpus) == 2
        sim.control.unload_driver()
        prepare("pcie-a10-4", folder)
        sim.control.load_driver()
        await listener.until(lambda: listener.states == [WELL] * 4)
        assert len(listener.snapshots[-1].gpus) == 4


def list_only(sim: SimNode, count: int) -> Callable[[], None]:
    """Lets the driver list this many GPUs from its next session on; returns what ends that."""
    facts = sim.sysfs_root.parent / "node.txt"
    complete = facts.read_text()
    lines = (line for line in complete.splitlines(keepends=True) if not line.startswith("gpu ") or int(line[4]) < count)
    facts.write_text("".join(lines))
    return lambda: replace_file(facts, complete.encode(), durable=False)


@pytest.mark.parametrize("listed", [0, 1])
async def test_gpus_that_the_driver_lists_late_are_found_and_reported_until_then(node: Prepare, listed: int) -> None:
    """NVML reads its list when a session begins."""
    sim = node("pcie-a10-4")
    missing = ", ".join(gpu.bus_id for gpu in sim.description.gpus[listed:])
    list_all = list_only(sim, listed)
    with structlog.testing.capture_logs() as logs:
        async with watched(sim) as (_, listener):
            await listener.rounds(5)
            (snapshot,) = listener.snapshots
            assert (len(snapshot.gpus), snapshot.unlisted) == (listed, 4 - listed)
            sentence = f"the driver lists {listed} of the 4 NVIDIA GPUs on the PCI bus, not {missing}: see `dmesg`"
            assert snapshot.unlisted_sentence == sentence
            list_all()
            await listener.until(lambda: len(listener.snapshots[-1].gpus) == 4)
            assert listener.snapshots[-1].unlisted_sentence is None
            sim.control.xid(3, 119)
            await listener.until(lambda: listener.health[sim.description.uuid_of(3)].reason == "xid")
    assert listener.outages == []
    assert [line["reason"] for line in logs if line["event"] == "gpus_not_listed"] == [sentence]


async def test_a_long_call_delays_the_search_for_missing_gpus_and_is_no_outage(
    node: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, release = node("pcie-a10-4"), threading.Event()
    list_all = list_only(sim, 3)
    with structlog.testing.capture_logs() as logs:
        async with watched(sim) as (monitor, listener):
            await listener.rounds(1)
            call = asyncio.create_task(monitor._nvml._worker.call(release.wait, timeout_seconds=60, gpu=3))
            try:
                with monkeypatch.context() as patch:
                    patch.setattr("gpumgr.driver.session._SHUTDOWN_SECONDS", 0.05)
                    await listener.until(lambda: any(line["event"] in ("nvml_not_reopened", "nvml_down") for line in logs))
                monitor._relist_at = float("inf")
                await listener.rounds(2)
                sim.control.xid(0, 119)
                await listener.until(lambda: listener.states[0][1] == "xid")
            finally:
                release.set()
            await call
            list_all()
            monitor._relist_at = 0.0
            await listener.until(lambda: len(listener.snapshots[-1].gpus) == 4)
    assert listener.outages == []


async def test_the_pci_bus_has_no_gpus_of_virtual_machines_and_no_virtual_functions(node: Prepare) -> None:
    sim = node("pcie-a10-4")
    devices = [sim.sysfs_root / "bus/pci/devices" / gpu.bus_id for gpu in sim.description.gpus]
    assert read_pci_gpus(sim.sysfs_root) == tuple(sorted(gpu.bus_id for gpu in sim.description.gpus))
    (devices[0] / "physfn").symlink_to(devices[1])
    for number, driver in ((1, "vfio-pci"), (2, "nvidia")):
        (devices[number] / "driver").symlink_to(sim.sysfs_root / "bus/pci/drivers" / driver)
        (sim.sysfs_root / "bus/pci/drivers" / driver).mkdir(parents=True)
    bridge, other = (sim.sysfs_root / "bus/pci/devices" / name for name in ("0000:aa:00.0", "0000:ab:00.0"))
    for device, vendor, kind in ((bridge, "0x10de", "0x068000"), (other, "0x1002", "0x030200")):
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert read_pci_gpus(sim.sysfs_root) == (devices[2].name, devices[3].name)
    assert read_pci_gpus(sim.sysfs_root / "nowhere") == ()


async def test_samples_are_taken_soon_while_someone_waits_for_them(node: Prepare) -> None:
    async with watched(node("mixed-2"), sample_period_seconds=3600.0) as (monitor, listener):
        await listener.rounds(1)
        with monitor.sampling_soon():
            await listener.rounds(3)


async def test_the_monitor_watches_processes_when_configured(mixed: SimNode) -> None:
    uuid = mixed.description.uuid_of(0)
    mixed.control.set_processes(0, [SimProcess(pid=20, sm_percent=35)])
    wanted = False
    async with watched(mixed, process_utilization=lambda: wanted) as (_, listener):

        def latest() -> float | None:
            processes = listener.samples[-1].gpus[uuid].processes
            assert processes is not None
            return processes[0].utilization_ratio

        await listener.rounds(2)
        assert {process.utilization_ratio for s in listener.samples for process in s.gpus[uuid].processes or ()} == {None}
        wanted = True
        await listener.until(lambda: latest() == 0.35)
        wanted = False
        await listener.until(lambda: latest() is None)
