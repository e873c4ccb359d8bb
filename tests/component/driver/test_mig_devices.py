"""MIG devices through the real binding and the simulated library."""

import pytest

from gpumgr.driver.binding import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_SUPPORTED

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
