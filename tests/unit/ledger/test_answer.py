"""The answer to Allocate: devices and annotations, and how each kind of allocation lets its container see the driver."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, Amounts
from gpumgr.ledger.answer import (
    LIBRARY_PATH,
    LOADER_PATHS,
    ContainerResponse,
    DriverAccess,
    GrantedGpu,
    HostPaths,
    allocation_id_in,
    core_answer,
    instance_answer,
    memory_answer,
    replica_answer,
)
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Allocation, ClaimRequest, MigDevice
from tests.allocations import allocated

from .nodes import ONE, TWO

GPUS = {"g": GrantedGpu(uuid="GPU-g", minor=0, instances={"MIG-a": (3, 0)})}
ON_DEMAND = MigDevice(gpu="g", profile="1g.10gb", memory_slices=1, uuid="MIG-a", gpu_instance=3, compute_instance=0)
CLAIM = ClaimRequest(uid="uid", namespace="team", name="gpu", request="gpu")
SHARE, WHOLE = Amounts(30, 4096), Amounts(100, 0)
STATIC_MIG = Allocation(id="a", gpus={"g": SHARE}, device_ids={"mig": {"g": 1}})

Ask = Callable[[HostPaths], ContainerResponse]

KINDS: dict[str, tuple[Ask, str]] = {
    "share": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}, mechanisms=("hami-core",)), GPUS, host), "GPU-g"),
    "share without limits": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}), GPUS, host), "GPU-g"),
    "whole GPU": (lambda host: core_answer(Allocation(id="a", gpus={"g": WHOLE}), GPUS, host), "GPU-g"),
    "claim": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}, claim=CLAIM, cdi=True), GPUS, host), "GPU-g"),
    "nvidia.com/gpu": (lambda host: replica_answer(Allocation(id="a", gpus={"g": SHARE}), GPUS, host), "GPU-g"),
    "MIG device": (lambda host: instance_answer(STATIC_MIG, GPUS, ["MIG-a"], host), "MIG-a"),
    "MIG device on demand": (
        lambda host: replica_answer(Allocation(id="a", gpus={"g": SHARE}, mig_devices=(ON_DEMAND,)), GPUS, host),
        "MIG-a",
    ),
}
ARM: dict[str, Any] = {"machine": "aarch64"}


def host(*, mounted: bool = True, toolkit: bool = False, lacks: str = "/none", machine: str = "x86_64") -> HostPaths:
    return HostPaths(
        exists=lambda path: not path.startswith(lacks),
        share_driver_dir="/vdriver/nvidia",
        whole_driver_dir="/vdriver/origin",
        driver_access=lambda: DriverAccess(mounted=mounted, toolkit=toolkit),
        machine=machine,
    )


def driver_mounts(answer: ContainerResponse) -> dict[str, str]:
    assert all(mount.read_only for mount in answer.mounts)
    return {mount.container_path: mount.host_path for mount in answer.mounts if mount.container_path != "/etc/vcuda"}


#: Options of the host -> whether the driver's files are mounted, and the container's environment; the devices' names in place of {}.
WAYS: dict[str, tuple[dict[str, Any], bool, dict[str, str]]] = {
    "mounted": ({}, True, {"NVIDIA_VISIBLE_DEVICES": "{}"}),
    "mounted, though a toolkit may be there": ({"toolkit": True}, True, {"NVIDIA_VISIBLE_DEVICES": "void"}),
    "the toolkit brings them": ({"mounted": False, "toolkit": True}, False, {"NVIDIA_VISIBLE_DEVICES": "{}"}),
    "there is no mirror": ({"toolkit": True, "lacks": "/vdriver"}, False, {"NVIDIA_VISIBLE_DEVICES": "{}"}),
    # glibc of arm64 does not search the subfolders. Where nothing is mounted, the toolkit's files need no variable.
    "arm64, mounted": (ARM, True, {"NVIDIA_VISIBLE_DEVICES": "{}", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}),
    "arm64, not mounted": ({**ARM, "mounted": False}, False, {"NVIDIA_VISIBLE_DEVICES": "{}"}),
    "arm64, there is no mirror": ({**ARM, "lacks": "/vdriver"}, False, {"NVIDIA_VISIBLE_DEVICES": "{}"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ask", "visible"), KINDS.values(), ids=KINDS)
def test_the_drivers_files_are_mounted_where_every_image_finds_them_or_left_to_the_toolkit(
    ask: Ask, visible: str, way: str
) -> None:
    """The image's LD_LIBRARY_PATH stays where it can: images need it for libraries of their own."""
    options, mounted, envs = WAYS[way]
    answer = ask(host(**options))
    everything = {
        LIBRARY_PATH: "/vdriver/origin",
        **dict.fromkeys(LOADER_PATHS, "/vdriver/origin/lib64"),
        "/usr/bin/nvidia-smi": "/vdriver/origin/bin/nvidia-smi",
    }
    assert driver_mounts(answer) == (everything if mounted else {})
    assert answer.envs == {key: text.format(visible) for key, text in envs.items()}
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= {node.container_path for node in answer.devices}


def test_a_driver_without_nvidia_smi() -> None:
    answer = core_answer(Allocation(id="a", gpus={"g": WHOLE}), GPUS, host(lacks="/vdriver/origin/bin/"))
    assert set(driver_mounts(answer)) == {LIBRARY_PATH, *LOADER_PATHS}


@pytest.mark.parametrize("mounted", [False, True])
def test_vcuda_mounts_its_library_with_every_way(mounted: bool) -> None:
    """The library must be found before the driver's own, which an image may have in its cache."""
    share = Allocation(id="a", gpus={"g": SHARE}, mechanisms=("vcuda",))
    answer = core_answer(share, GPUS, host(mounted=mounted))
    assert set(driver_mounts(answer).values()) == {"/vdriver/nvidia", "/vdriver/nvidia/lib64", "/vdriver/nvidia/bin/nvidia-smi"}
    assert answer.envs["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


@pytest.mark.hami_bug("B26: CDI names of MIG devices can't be resolved")
def test_the_answer_has_the_mig_device_its_gpu_and_its_capabilities() -> None:
    caps = HostPaths(
        exists=lambda path: path.startswith("/dev"),
        mig_minors=lambda: "config 1\nmonitor 2\ngpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\ngpu1/gi3/access 165\n",
    )
    response = instance_answer(STATIC_MIG, GPUS, ["MIG-a"], caps)
    assert response.envs == {"NVIDIA_VISIBLE_DEVICES": "MIG-a"}
    assert [device.host_path for device in response.devices] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31",
    ]
    with pytest.raises(Refusal, match="the MIG device MIG-x no longer exists; delete the pod"):
        instance_answer(STATIC_MIG, GPUS, ["MIG-x"], caps)


PAIR = {ONE: GrantedGpu(uuid="GPU-0", minor=0), TWO: GrantedGpu(uuid="GPU-1", minor=None)}
BOTH = allocated(id="a1", cores={ONE: ALL_CORES, TWO: ALL_CORES}, blocks={ONE: 0b111}, gpus=(ONE, TWO))
PART = allocated(id="a2", cores={ONE: 0b111}, blocks={ONE: 0b1}, gpus=(ONE,))


def test_everything_is_named_as_gpu_manager_names_it() -> None:
    answer = core_answer(BOTH, PAIR, replace(host(), extra_devices=("/dev/infiniband/x",)))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    assert [node.host_path for node in answer.devices] == [
        "/dev/nvidia0",
        "/dev/dxg",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/infiniband/x",
    ]
    assert {("/usr/local/nvidia", "/vdriver/origin"), ("/etc/vcuda", "/etc/gpu-manager/vm/a1")} <= {
        (m.container_path, m.host_path) for m in answer.mounts
    }
    assert answer.annotations == {CORE_RESOURCE: "200", "tencent.com/vcuda-device": "/dev/nvidia0"}
    assert memory_answer(BOTH).annotations == {MEMORY_RESOURCE: str(3 * 256 * 1024 * 1024)}


@pytest.mark.parametrize("gpu", [ONE, TWO])
def test_the_device_of_wsl_is_named_for_gpus_without_a_minor_number_only(gpu: str) -> None:
    wsl = HostPaths(exists=lambda path: path in {"/host/dev/dxg", "/host/dev/nvidia0"}, device_root="/host/dev")
    answer = core_answer(allocated(id="a", cores={gpu: ALL_CORES}, blocks={}, gpus=(gpu,)), PAIR, wsl)
    named = "nvidia0" if gpu == ONE else "dxg"
    assert [(node.container_path, node.host_path) for node in answer.devices] == [(f"/dev/{named}", f"/host/dev/{named}")]


def test_only_what_the_host_has_is_named() -> None:
    bare = HostPaths(exists=lambda path: path == "/host/dev/nvidia0", device_root="/host/dev", share_driver_dir="/share")
    answer = core_answer(PART, PAIR, bare)
    assert [(node.container_path, node.host_path) for node in answer.devices] == [("/dev/nvidia0", "/host/dev/nvidia0")]
    assert [m.container_path for m in answer.mounts] == ["/etc/vcuda"]


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        ({"/etc/vcuda": "/etc/gpu-manager/vm/a1"}, "a1"),
        ({"/etc/vcuda": "/etc/gpu-manager/vm/a1/"}, "a1"),
        ({"/etc/vcuda": "/"}, None),
        ({"/usr/local/nvidia": "/share"}, None),
    ],
)
def test_the_allocations_id_is_in_its_response(mounts: dict[str, str], found: str | None) -> None:
    assert allocation_id_in(mounts) == found
