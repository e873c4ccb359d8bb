"""What may be set on a GPU, through the real binding and the simulated library."""

import re
from pathlib import Path

import pytest

from gpumgr.common.errors import NvmlAbsent, NvmlError
from gpumgr.driver.driver import Nvml
from gpumgr.placement.devices import MemoryLimit
from gpumgr.sim.library import SimNode

from .conftest import Prepare, opened
from .new_driver import NEW_NODE, lay_out_cgroups

MIB = 1024 * 1024
EXCLUSIVE_PROCESS = 3


@pytest.fixture
def new_node(node: Prepare, tmp_path: Path) -> SimNode:
    (tmp_path / "new.yaml").write_text(NEW_NODE)
    return node(str(tmp_path / "new.yaml"))


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return lay_out_cgroups(tmp_path / "cgroup")


# -- compute mode ------------------------------------------------------------------------------------------------------------


async def test_the_compute_mode_is_kept_by_the_driver(mixed: SimNode) -> None:
    uuid = mixed.description.uuid_of(1)
    async with opened(mixed) as nvml:
        assert await nvml.compute_mode(uuid) == 0
        await nvml.set_compute_mode(uuid, EXCLUSIVE_PROCESS)
    assert (mixed.control.compute_mode(1), mixed.control.compute_mode(0)) == (EXCLUSIVE_PROCESS, 0)
    async with opened(mixed) as nvml:
        assert await nvml.compute_mode(uuid) == EXCLUSIVE_PROCESS
        mixed.control.set_compute_mode(1, 2)
        assert await nvml.compute_mode(uuid) == 2
        mixed.control.unload_driver()
        mixed.control.load_driver()
        await nvml.open()
        assert await nvml.compute_mode(uuid) == 0


async def test_errors_name_the_function_and_the_gpu(mixed: SimNode, nvml: Nvml) -> None:
    uuid = mixed.description.uuid_of(0)
    mixed.control.set_result("nvmlDeviceSetComputeMode", 4)
    with pytest.raises(NvmlError, match=f"^nvmlDeviceSetComputeMode of {uuid}: .*NVML error 4"):
        await nvml.set_compute_mode(uuid, EXCLUSIVE_PROCESS)
    mixed.control.set_result("nvmlDeviceGetComputeMode", 3)
    with pytest.raises(NvmlError, match=f"^nvmlDeviceGetComputeMode of {uuid}: Not Supported"):
        await nvml.compute_mode(uuid)
    with pytest.raises(NvmlError, match=r"^nvmlDeviceGetHandleByUUID of GPU-0: Not Found"):
        await nvml.compute_mode("GPU-0")
    mixed.control.unload_driver()
    with pytest.raises(NvmlAbsent, match="not loaded"):
        await nvml.compute_mode(uuid)


# -- memory limits -----------------------------------------------------------------------------------------------------------


async def test_limits_are_set_and_read_back(new_node: SimNode, cgroups: Path) -> None:
    uuid, cgroup = new_node.description.uuid_of(1), str(cgroups / "kubepods/container")
    limit = MemoryLimit(soft_bytes=256 * MIB, hard_bytes=512 * MIB)
    async with opened(new_node) as nvml:
        assert await nvml.gpu_with_memory_limits() == new_node.description.uuid_of(0)
        assert await nvml.memory_limit(uuid, cgroup) == MemoryLimit()
        await nvml.set_memory_limit(uuid, cgroup, 256 * MIB, 512 * MIB)
        assert await nvml.memory_limit(uuid, cgroup) == limit
        assert await nvml.memory_limit(uuid, f"{cgroup}/child") == limit
        assert await nvml.memory_limit(new_node.description.uuid_of(0), cgroup) == MemoryLimit()
        assert new_node.control.memory_limits(1) == {cgroup: limit}
        await nvml.set_memory_limit(uuid, cgroup, 0, None)
    assert new_node.control.memory_limits(1) == {cgroup: MemoryLimit()}


async def test_a_cgroup_that_can_not_be_limited(new_node: SimNode, cgroups: Path) -> None:
    uuid = new_node.description.uuid_of(0)
    async with opened(new_node) as nvml:
        for place in ("kubepods/container/child", "nowhere"):
            with pytest.raises(NvmlError, match=f"nvmlDeviceSetMemoryLimits_v1 of {uuid}: Not Found"):
                await nvml.set_memory_limit(uuid, str(cgroups / place), 0, MIB)
        new_node.control.set_result("nvmlDeviceGetMemoryLimits_v1", 999)
        with pytest.raises(NvmlError, match=f"nvmlDeviceGetMemoryLimits_v1 of {uuid}: Unknown"):
            await nvml.memory_limit(uuid, str(cgroups / "kubepods"))
        said = "no GPU supports memory limits (nvmlDeviceGetMemoryLimits_v1: Unknown Error (NVML error 999)): see `nvidia-smi`"
        with pytest.raises(NvmlError, match=re.escape(said)):
            await nvml.gpu_with_memory_limits()
        new_node.control.set_result("nvmlDeviceGetUUID", 15, gpu=0)
        new_node.control.set_result("nvmlDeviceGetMemoryLimits_v1", 0)
        assert await nvml.gpu_with_memory_limits() == new_node.description.uuid_of(1), "the GPU that works"


def hide_memory_limits(library: Path) -> None:
    library.write_bytes(library.read_bytes().replace(b"MemoryLimits_v1", b"MemoryLimits_v0"))


async def test_a_library_without_the_functions(new_node: SimNode) -> None:
    """As of older drivers."""
    hide_memory_limits(Path(new_node.library_path))
    async with opened(new_node) as nvml:
        said = r"driver 615.71.09 has no memory limits \(nvmlDeviceGetMemoryLimits_v1: Function Not Found.*install driver 615"
        with pytest.raises(NvmlError, match=said):
            await nvml.gpu_with_memory_limits()
        with pytest.raises(NvmlError, match="Function Not Found"):
            await nvml.set_memory_limit(new_node.description.uuid_of(0), "/", 0, MIB)
        assert nvml.call_errors == {}


async def test_a_driver_whose_limits_are_off(new_node: SimNode, cgroups: Path) -> None:
    new_node.control.set_result("nvmlDeviceGetMemoryLimits_v1", 3)
    nvml = Nvml(library_path=new_node.library_path, cgroup_root=cgroups)
    await nvml.open()
    with pytest.raises(NvmlError, match="keeps no limits in cgroups"):
        await nvml.gpu_with_memory_limits()
    await nvml.close()
    nvml = Nvml(library_path=new_node.library_path, cgroup_root=cgroups / "kubepods/container")
    await nvml.open()
    assert await nvml.gpu_with_memory_limits() == new_node.description.uuid_of(0), "no cgroup there has limits: it says nothing"
    await nvml.close()


async def test_gpus_with_mig_are_left_out(new_node: SimNode) -> None:
    async with opened(new_node) as nvml:
        new_node.control.set_mig(0, enabled=True)
        assert await nvml.gpu_with_memory_limits() == new_node.description.uuid_of(1)
        new_node.control.set_mig(1, enabled=True)
        with pytest.raises(NvmlError, match="MIG is enabled"):
            await nvml.gpu_with_memory_limits()
