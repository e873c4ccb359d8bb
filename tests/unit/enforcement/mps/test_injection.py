"""What containers are given for MPS."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCES, Resource
from gpumgr.enforcement.mps.backend import answer
from gpumgr.enforcement.mps.commands import MpsProtocol
from tests.shares import TWO_GPUS, gpu_share, shared_gpu

ROOT = Path("/run/gpumgr/mps")
UUID = "GPU-0fe1c342-0000-0000-0000-000000000001"
TENANT = gpu_share("d79ef655d5eaf955", shared_gpu(UUID, memory_bytes=3 << 30), pod=None, container=None)
GPU = f"/run/gpumgr/mps/{UUID}"


def test_in_protocol_2_the_environment_limits() -> None:
    core = answer(TENANT, "core", 2, ROOT, limited=True)
    assert core.envs == {"CUDA_MPS_PIPE_DIRECTORY": f"{GPU}/pipe", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert [(m.host_path, m.container_path, m.read_only) for m in core.mounts] == [
        (f"{GPU}/pipe", f"{GPU}/pipe", True),
        (f"{GPU}/shm", "/dev/shm", False),
    ]
    assert answer(TENANT, "memory", 2, ROOT, limited=True).envs == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3072M"}


def test_in_protocol_3_the_one_socket_limits() -> None:
    core = answer(TENANT, "core", 3, ROOT, limited=True)
    own = f"{GPU}/pipe/gpu/{TENANT.allocation}"
    assert core.envs == {"CUDA_MPS_PIPE_DIRECTORY": own}
    assert [m.host_path for m in core.mounts] == [own, f"{GPU}/shm"]
    assert not answer(TENANT, "memory", 3, ROOT, limited=True).envs


def test_without_limits_only_the_way_to_the_daemon_is_left() -> None:
    core = answer(TENANT, "core", 2, ROOT, limited=False)
    assert core.envs == {"CUDA_MPS_PIPE_DIRECTORY": f"{GPU}/pipe"}
    assert core.mounts == answer(TENANT, "core", 2, ROOT, limited=True).mounts
    assert not answer(TENANT, "memory", 2, ROOT, limited=False).envs


@pytest.mark.parametrize("protocol", [2, 3])
def test_neither_the_pod_nor_the_other_call_changes_an_answer(protocol: MpsProtocol) -> None:
    named = replace(TENANT, pod=("demo", "resnet"), pod_uid="1", container="main", core_limit=90)
    for other in (named, replace(TENANT, gpus=(shared_gpu(UUID, memory_bytes=0),))):
        assert answer(other, "core", protocol, ROOT, limited=True) == answer(TENANT, "core", protocol, ROOT, limited=True)
    for other in (named, replace(TENANT, gpus=(shared_gpu(UUID, cores=0, memory_bytes=3 << 30),))):
        assert answer(other, "memory", protocol, ROOT, limited=True) == answer(TENANT, "memory", protocol, ROOT, limited=True)


@pytest.mark.parametrize("kind", RESOURCES)
def test_a_container_with_several_gpus_is_refused(kind: Resource) -> None:
    with pytest.raises(Refusal, match=r"MPS limits a container on one GPU only, and allocation a1 .* shares 2 GPUs"):
        answer(gpu_share("a1", *TWO_GPUS, pod=None), kind, 3, ROOT, limited=True)
