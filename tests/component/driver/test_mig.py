"""MIG devices and their profiles, and how they are created and destroyed, through the real binding and the simulated library."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import FUNCTION_NOT_FOUND, GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED
from gpumgr.driver.driver import Nvml
from gpumgr.placement.devices import Gpu, MigInstance, MigProfile
from gpumgr.sim.control import SimProcess
from gpumgr.sim.library import SimNode, prepare
from tests.mig_profiles import H100

from .conftest import Prepare, give_up_after, opened, until_calls_return

MIB = 1 << 20
IN_USE = 19
CREATE_COMPUTE, DESTROY_GPU_INSTANCE = "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceDestroy"
PLACEMENTS, PROFILE_V1, PROFILE_V2 = (
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetGpuInstanceProfileInfoV",
)


async def gpu_of(nvml: Nvml, index: int) -> Gpu:
    return (await nvml.snapshot()).gpus[index]


class Hand:
    """One GPU in MIG mode without MIG devices: GPU 0 of an HGX H100."""

    def __init__(self, node: SimNode, nvml: Nvml, profiles: Mapping[str, MigProfile]) -> None:
        self.node, self.control, self.nvml, self.uuid = node, node.control, nvml, node.description.uuid_of(0)
        self._profiles = profiles

    async def create(self, profile: str, start: int) -> MigInstance:
        return await self.nvml.create_mig_instance(self.uuid, self._profiles[profile], start)

    async def destroy(self, instance: MigInstance) -> None:
        await self.nvml.destroy_mig_instance(self.uuid, instance.uuid)

    async def devices(self) -> tuple[MigInstance, ...]:
        found = (await gpu_of(self.nvml, 0)).mig_instances
        assert await self.nvml.mig_instances(self.uuid) == found
        return found


@asynccontextmanager
async def in_mig_mode(node: SimNode) -> AsyncIterator[Hand]:
    async with opened(node) as nvml:
        await nvml.enable_mig(node.description.uuid_of(0))
        yield Hand(node, nvml, {each.name: each for each in (await gpu_of(nvml, 0)).mig_profiles})


@pytest.fixture
async def hand(node: Prepare) -> AsyncIterator[Hand]:
    async with in_mig_mode(node("hgx-h100-8")) as made:
        yield made


# -- profiles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [False, True], ids=["a driver without names of profiles", "with names"])
@pytest.mark.parametrize("enabled", [False, True])
async def test_the_profiles_of_a_gpu_also_while_its_mig_mode_is_off(enabled: bool, names: bool, node: Prepare) -> None:
    sim = node("hgx-h100-8")
    sim.control.set_mig(0, enabled=enabled)
    sim.control.set_result(PROFILE_V2, 0 if names else FUNCTION_NOT_FOUND)
    async with opened(sim) as nvml:
        assert {*(await gpu_of(nvml, 0)).mig_profiles} == {*H100}


async def test_a_gpu_without_mig(node: Prepare) -> None:
    sim = node("pcie-a10-4")
    async with opened(sim) as nvml:
        assert [gpu.mig_profiles for gpu in (await nvml.snapshot()).gpus] == [()] * 4
        with pytest.raises(NvmlError, match="has no MIG mode"):
            await nvml.enable_mig(sim.description.uuid_of(0))


@pytest.mark.parametrize("functions", [(PROFILE_V1, PROFILE_V2), (PLACEMENTS,)])
@pytest.mark.parametrize("code", [FUNCTION_NOT_FOUND, NO_PERMISSION])
async def test_a_driver_that_reports_no_profiles(functions: tuple[str, ...], code: int, node: Prepare) -> None:
    sim = node("mig-4")
    for function in functions:
        sim.control.set_result(function, code)
    async with opened(sim) as nvml:
        snapshot = await nvml.snapshot()
    assert ([gpu.mig_profiles for gpu in snapshot.gpus], snapshot.failures) == ([()] * 4, ())
    assert len(snapshot.gpus[2].mig_instances) == 4


async def test_the_places_of_mig_devices(node: Prepare) -> None:
    sim = node("mig-4")
    async with opened(sim) as nvml:
        gpu = await gpu_of(nvml, 2)
        assert [each.memory_slices for each in gpu.mig_instances] == [0b11110000, 0b11, 0b100, 0b1000]
        assert {each.profile for each in gpu.mig_instances} <= {each.name for each in gpu.mig_profiles}
        for function in ("nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo"):
            sim.control.set_result(function, NO_PERMISSION)
            assert {each.memory_slices for each in (await gpu_of(nvml, 2)).mig_instances} == {0}
            sim.control.set_result(function, 0)


# -- MIG devices -------------------------------------------------------------------------------------------------------------


async def test_the_mig_devices_of_each_gpu_are_read(node: Prepare) -> None:
    async with opened(node("mig-4")) as nvml:
        gpus = (await nvml.snapshot()).gpus
    assert [[instance.profile for instance in gpu.mig_instances] for gpu in gpus] == [
        [],
        [],
        ["3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"],
        ["1c.3g.20gb", "1g.5gb+me"],
    ]
    second = gpus[2].mig_instances[1]
    assert (second.gpu_instance, second.compute_instance, second.memory_bytes) == (2, 0, 10 << 30)
    uuids = [instance.uuid for gpu in gpus for instance in gpu.mig_instances]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("MIG-") for uuid in uuids)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
async def test_a_driver_that_cannot_count_mig_devices_has_none(code: int, node: Prepare) -> None:
    made = node("mig-4")
    made.control.set_result("nvmlDeviceGetMaxMigDeviceCount", code)
    async with opened(made) as nvml:
        snapshot = await nvml.snapshot()
    assert (snapshot.gpus[2].mig_instances, snapshot.failures) == ((), ())


async def test_a_gpu_that_is_lost_while_its_mig_devices_are_read_is_a_failure(node: Prepare) -> None:
    made = node("mig-4")
    made.control.set_result("nvmlDeviceGetMigDeviceHandleByIndex", GPU_IS_LOST, gpu=3)
    async with opened(made) as nvml:
        snapshot = await nvml.snapshot()
    assert [gpu.index for gpu in snapshot.gpus] == [0, 1, 2]
    assert [failure.index for failure in snapshot.failures] == [3]


async def test_a_profile_that_the_name_lacks_follows_from_the_sizes(node: Prepare) -> None:
    made = node("mig-4")
    made.control.set_result("nvmlDeviceGetName", NOT_SUPPORTED)
    async with opened(made) as nvml:
        gpu = (await nvml.snapshot()).gpus[3]
    assert [instance.profile for instance in gpu.mig_instances] == ["1c.3g.20gb", "1g.5gb"]


# -- MIG mode ----------------------------------------------------------------------------------------------------------------


async def test_mig_mode_is_turned_on_once(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    async with opened(sim) as nvml:
        await nvml.enable_mig(sim.description.uuid_of(1))
        assert [gpu.mig_enabled for gpu in (await nvml.snapshot()).gpus[:3]] == [False, True, False]
        sim.control.set_result("nvmlDeviceSetMigMode", NO_PERMISSION)
        await nvml.enable_mig(sim.description.uuid_of(1))
        with pytest.raises(NvmlError, match=r"nvmlDeviceSetMigMode of GPU-.*: Insufficient Permissions"):
            await nvml.enable_mig(sim.description.uuid_of(0))


@pytest.mark.parametrize(("busy", "reason"), [(True, "In use by another client"), (False, "GPU requires reset")])
async def test_a_mode_that_needs_a_reset_is_an_error_until_then(busy: bool, reason: str, node: Prepare) -> None:
    sim = node("hgx-h100-8")
    uuid = sim.description.uuid_of(0)
    if busy:
        sim.control.set_processes(0, [SimProcess(pid=7)])
    else:
        sim.control.require_reset_for_mig(0)
    async with opened(sim) as nvml:
        said = f"MIG mode of {uuid} is not on yet ({reason}): it needs a reset of the GPU."
        for _ in range(2):
            with pytest.raises(NvmlError, match=re.escape(said)):
                await nvml.enable_mig(uuid)
        assert not (await gpu_of(nvml, 0)).mig_enabled
        sim.control.restore_gpu(0)
        await nvml.enable_mig(uuid)
        assert (await gpu_of(nvml, 0)).mig_enabled


# -- create ------------------------------------------------------------------------------------------------------------------


async def test_mig_devices_are_created_exactly_where_they_should_be(hand: Hand) -> None:
    made = [await hand.create(*place) for place in (("1g.10gb", 6), ("3g.40gb", 0), ("1g.20gb", 4))]
    assert [(each.profile, each.memory_slices, each.memory_bytes) for each in made] == [
        ("1g.10gb", 0b1000000, 9984 * MIB),
        ("3g.40gb", 0b1111, 40448 * MIB),
        ("1g.20gb", 0b110000, 20096 * MIB),
    ]
    assert len({each.uuid for each in made}) == 3
    assert await hand.devices() == tuple(made)


@pytest.mark.parametrize(("profile", "start"), [("1g.10gb", 3), ("2g.20gb", 2), ("7g.80gb", 0)])
async def test_a_place_that_is_taken_is_refused(profile: str, start: int, hand: Hand) -> None:
    there = await hand.create("3g.40gb", 0)
    with pytest.raises(NvmlError, match=r"nvmlDeviceCreateGpuInstanceWithPlacement of GPU-.*: Insufficient Resources"):
        await hand.create(profile, start)
    assert await hand.devices() == (there,)


async def test_what_is_no_place_or_no_mig_gpu_is_refused(hand: Hand) -> None:
    with pytest.raises(NvmlError, match="Invalid Argument"):
        await hand.create("2g.20gb", 1)
    hand.uuid = hand.node.description.uuid_of(1)
    with pytest.raises(NvmlError, match="Not Supported"):
        await hand.create("2g.20gb", 0)


@pytest.mark.parametrize("function", [CREATE_COMPUTE, "nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetAttributes_v2"])
async def test_after_a_failure_nothing_is_left(function: str, hand: Hand) -> None:
    hand.control.set_result(function, GPU_IS_LOST, gpu=0)
    with pytest.raises(NvmlError, match=f"{function.removesuffix('_v2')}.* of {hand.uuid}: GPU is lost"):
        await hand.create("2g.20gb", 0)
    assert hand.control.mig_instances(0) == {}
    hand.control.set_result(function, 0, gpu=0)
    assert (await hand.create("7g.80gb", 0)).memory_slices == 0xFF


async def test_a_driver_without_the_compute_instance(hand: Hand) -> None:
    hand.control.set_result("nvmlGpuInstanceGetComputeInstanceProfileInfo", FUNCTION_NOT_FOUND)
    with pytest.raises(NvmlError, match="no compute instance of 2 slices"):
        await hand.create("2g.20gb", 0)
    assert hand.control.mig_instances(0) == {}


async def test_gpu_instances_that_are_left_over_are_destroyed_where_the_place_is_needed(hand: Hand) -> None:
    there = await hand.create("1g.10gb", 6)
    hand.control.set_result(CREATE_COMPUTE, 999)
    hand.control.set_result(DESTROY_GPU_INSTANCE, IN_USE)
    for start in (0, 4):
        with pytest.raises(NvmlError, match=f"{CREATE_COMPUTE} .*Unknown"):
            await hand.create("2g.20gb", start)
    assert await hand.devices() == (there,)
    hand.control.set_result(CREATE_COMPUTE, 0)
    with pytest.raises(NvmlError, match=f"{DESTROY_GPU_INSTANCE} .*In use"):
        await hand.create("1g.10gb", 1)
    hand.control.set_result(DESTROY_GPU_INSTANCE, 0)
    small = await hand.create("1g.10gb", 1)
    assert {*await hand.devices()} == {small, there}
    assert [each.uuid for each in hand.control.mig_instances(0).values()].count("-") == 1, "the one elsewhere stays"
    with pytest.raises(NvmlError, match="Insufficient Resources"):
        await hand.create("7g.80gb", 0)
    assert {*await hand.devices()} == {small, there}


# -- destroy -----------------------------------------------------------------------------------------------------------------


async def test_a_mig_device_is_destroyed_and_a_second_time_is_no_error(hand: Hand) -> None:
    first, second = await hand.create("1g.10gb", 0), await hand.create("2g.20gb", 2)
    for _ in range(2):
        await hand.destroy(first)
        assert await hand.devices() == (second,)
    assert (await hand.create("2g.20gb", 0)).uuid == first.uuid, "as NVIDIA's driver makes them"
    await hand.nvml.destroy_mig_instance(hand.node.description.uuid_of(1), second.uuid)
    assert second in await hand.devices(), "another GPU was named"


async def test_a_mig_device_with_processes_is_not_destroyed(hand: Hand) -> None:
    used, free = await hand.create("1g.10gb", 0), await hand.create("1g.10gb", 1)
    on_it = [SimProcess(pid=pid, memory_bytes=MIB, mig_uuid=used.uuid) for pid in (41, 9)]
    hand.control.set_processes(0, [*on_it, SimProcess(pid=5)])
    assert [each.pid for each in await hand.nvml.processes(used.uuid) or ()] == [9, 41]
    assert [each.pid for each in await hand.nvml.processes(hand.uuid) or ()] == [5, 9, 41]
    await hand.destroy(free)
    with pytest.raises(NvmlError, match=f"^the MIG device {used.uuid} is not destroyed, since processes use it: pid 9, 41$"):
        await hand.destroy(used)
    hand.control.set_result("nvmlDeviceGetComputeRunningProcesses_v3", FUNCTION_NOT_FOUND)
    hand.control.set_result("nvmlDeviceGetComputeRunningProcesses_v2", FUNCTION_NOT_FOUND)
    with pytest.raises(NvmlError, match=r"nvmlComputeInstanceDestroy of GPU-.*: In use by another client"):
        await hand.destroy(used)
    assert await hand.devices() == (used,)


async def test_what_a_failed_destruction_leaves_does_not_stay_in_the_way(hand: Hand) -> None:
    old = await hand.create("3g.40gb", 4)
    hand.control.set_result(DESTROY_GPU_INSTANCE, IN_USE)
    with pytest.raises(NvmlError, match=f"{DESTROY_GPU_INSTANCE} of .*In use"):
        await hand.destroy(old)
    hand.control.set_result(DESTROY_GPU_INSTANCE, 0)
    await hand.destroy(old)
    new = await hand.create("1g.10gb", 5)
    assert (await hand.devices(), list(hand.control.mig_instances(0).values())) == ((new,), [new])


async def test_other_mig_devices_of_the_gpu_instance_stay(node: Prepare) -> None:
    sim = node("mig-4")
    pair = [
        MigInstance(uuid=f"MIG-{n}", profile="1c.3g.20gb", gpu_instance=2, compute_instance=n, memory_bytes=MIB, memory_slices=15)
        for n in range(2)
    ]
    sim.control.set_mig_instances(2, dict(enumerate(pair)))
    async with opened(sim) as nvml:
        await nvml.destroy_mig_instance(sim.description.uuid_of(2), "MIG-0")
        assert (await gpu_of(nvml, 2)).mig_instances == (pair[1],)
        await nvml.destroy_mig_instance(sim.description.uuid_of(2), "MIG-1")
        assert sim.control.mig_instances(2) == {}


async def test_without_mig_mode_there_is_nothing_to_destroy(node: Prepare) -> None:
    sim = node("hgx-h100-8")
    async with opened(sim) as nvml:
        await nvml.destroy_mig_instance(sim.description.uuid_of(0), "MIG-0")
        assert await nvml.mig_instances(sim.description.uuid_of(0)) == ()


# -- how long it takes, and how long it lasts --------------------------------------------------------------------------------


async def test_a_creation_that_hangs_ends(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.driver.driver._MIG_SECONDS", 0.2)
    hand.control.hang(function="nvmlDeviceCreateGpuInstanceWithPlacement")
    give_up_after(hand.nvml, 3600)  # the limit of other calls
    with pytest.raises(NvmlError, match=f"^the driver does not answer calls about {hand.uuid}$"):
        await hand.create("1g.10gb", 0)
    give_up_after(hand.nvml, 10)
    sample = (await hand.nvml.read()).sample
    assert (len(sample.gpus), [*sample.failures]) == (7, [hand.uuid])
    hand.control.release()
    await until_calls_return(hand.nvml)
    assert len(await hand.devices()) == 1, "the driver has gone on"


async def test_mig_devices_outlive_the_session_and_end_with_the_driver_or_a_reset(node: Prepare, tmp_path: Path) -> None:
    sim = node("hgx-h100-8")
    async with in_mig_mode(sim) as hand:
        made = await hand.create("1g.10gb", 2)
    again = prepare("hgx-h100-8", tmp_path / "node-0")
    async with in_mig_mode(again) as hand:
        assert await hand.devices() == (made,)
        again.control.restore_gpu(1)
        assert await hand.devices() == (made,)
        again.control.restore_gpu(0)
        assert ((await gpu_of(hand.nvml, 0)).mig_enabled, await hand.devices()) == (True, ())
        await hand.create("1g.10gb", 2)
        again.control.unload_driver()
        again.control.load_driver()
        await hand.nvml.open()
        assert not (await gpu_of(hand.nvml, 0)).mig_enabled
        await hand.nvml.enable_mig(hand.uuid)
        assert await hand.devices() == ()
