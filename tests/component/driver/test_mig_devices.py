"""MIG devices through the real binding and the simulated library."""

import pytest

from gpumgr.driver.binding import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_SUPPORTED
from gpumgr.placement.topology.devices import MigInstance

from .conftest import Prepare, opened

GIB = 1 << 30


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
    assert (second.gpu_instance, second.compute_instance, second.memory_bytes) == (2, 0, 10 * GIB)
    uuids = [instance.uuid for gpu in gpus for instance in gpu.mig_instances]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("MIG-") for uuid in uuids)


async def test_indices_without_a_mig_device_are_skipped(node: Prepare) -> None:
    made = node("mig-4")
    instances = {
        n: MigInstance(uuid=f"MIG-{n}", profile="1g.5gb", gpu_instance=n, compute_instance=0, memory_bytes=GIB) for n in (1, 6)
    }
    made.control.set_mig_instances(2, instances)
    async with opened(made) as nvml:
        assert (await nvml.snapshot()).gpus[2].mig_instances == (instances[1], instances[6])


async def test_a_gpu_whose_mig_mode_is_turned_off_has_no_mig_devices(node: Prepare) -> None:
    made = node("mig-4")
    async with opened(made) as nvml:
        made.control.set_mig(2, enabled=False)
        gpu = (await nvml.snapshot()).gpus[2]
    assert (gpu.mig_enabled, gpu.mig_instances) == (False, ())


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
