"""How the answer of each kind of allocation lets its container see the driver."""

from collections.abc import Callable

import pytest

from gpumgr.common.units import Amounts
from gpumgr.ledger.answer import (
    LIBRARY_PATH,
    LOADER_PATHS,
    ContainerResponse,
    DriverAccess,
    GrantedGpu,
    HostPaths,
    core_answer,
    instance_answer,
    replica_answer,
)
from gpumgr.ledger.ledger import Allocation, ClaimRequest, MigDevice

GPUS = {"g": GrantedGpu(uuid="GPU-g", minor=0, instances={"MIG-a": (3, 0)})}
ON_DEMAND = MigDevice(gpu="g", profile="1g.10gb", memory_slices=1, uuid="MIG-a", gpu_instance=3, compute_instance=0)
CLAIM = ClaimRequest(uid="uid", namespace="team", name="gpu", request="gpu")
SHARE, WHOLE = Amounts(30, 4096), Amounts(100, 0)

Ask = Callable[[HostPaths], ContainerResponse]

KINDS: dict[str, tuple[Ask, str]] = {
    "share": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}, mechanisms=("hami-core",)), GPUS, host), "GPU-g"),
    "share without limits": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}), GPUS, host), "GPU-g"),
    "whole GPU": (lambda host: core_answer(Allocation(id="a", gpus={"g": WHOLE}), GPUS, host), "GPU-g"),
    "claim": (lambda host: core_answer(Allocation(id="a", gpus={"g": SHARE}, claim=CLAIM, cdi=True), GPUS, host), "GPU-g"),
    "nvidia.com/gpu": (lambda host: replica_answer(Allocation(id="a", gpus={"g": SHARE}), GPUS, host), "GPU-g"),
    "MIG device": (
        lambda host: instance_answer(Allocation(id="a", gpus={"g": SHARE}, device_ids={"mig": {"g": 1}}), GPUS, ["MIG-a"], host),
        "MIG-a",
    ),
    "MIG device on demand": (
        lambda host: replica_answer(Allocation(id="a", gpus={"g": SHARE}, mig_devices=(ON_DEMAND,)), GPUS, host),
        "MIG-a",
    ),
}
kinds = pytest.mark.parametrize(("ask", "visible"), KINDS.values(), ids=KINDS)


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


@kinds
def test_without_a_toolkit_the_files_are_mounted_where_every_image_finds_them(ask: Ask, visible: str) -> None:
    """The image's LD_LIBRARY_PATH stays: images need it for libraries of their own."""
    answer = ask(host())
    assert driver_mounts(answer) == {
        LIBRARY_PATH: "/vdriver/origin",
        **dict.fromkeys(LOADER_PATHS, "/vdriver/origin/lib64"),
        "/usr/bin/nvidia-smi": "/vdriver/origin/bin/nvidia-smi",
    }
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": visible}
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= {node.container_path for node in answer.devices}


@kinds
@pytest.mark.parametrize(("mounted", "lacks"), [(True, "/none"), (False, "/none"), (True, "/vdriver")])
def test_on_another_machine_a_variable_names_the_mounted_files(ask: Ask, visible: str, mounted: bool, lacks: str) -> None:
    """glibc of arm64 does not search the subfolders. Where nothing is mounted, the toolkit's files need no variable."""
    answer = ask(host(machine="aarch64", mounted=mounted, lacks=lacks))
    named = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"} if LIBRARY_PATH in driver_mounts(answer) else {}
    assert bool(named) is (mounted and lacks == "/none")
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": visible, **named}


@kinds
def test_a_toolkit_that_may_be_there_is_kept_from_adding_the_mounted_files(ask: Ask, visible: str) -> None:
    answer = ask(host(toolkit=True))
    assert driver_mounts(answer)[LIBRARY_PATH] == "/vdriver/origin"
    assert visible not in answer.envs.values()
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "void"}


@kinds
def test_a_toolkit_that_brings_the_files_is_named_the_devices(ask: Ask, visible: str) -> None:
    answer = ask(host(mounted=False, toolkit=True))
    assert driver_mounts(answer) == {}
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": visible}


@kinds
def test_without_a_mirror_a_toolkit_is_not_kept_from_the_container(ask: Ask, visible: str) -> None:
    answer = ask(host(toolkit=True, lacks="/vdriver"))
    assert driver_mounts(answer) == {}
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": visible}


def test_a_driver_without_nvidia_smi() -> None:
    answer = core_answer(Allocation(id="a", gpus={"g": WHOLE}), GPUS, host(lacks="/vdriver/origin/bin/"))
    assert set(driver_mounts(answer)) == {LIBRARY_PATH, *LOADER_PATHS}


@pytest.mark.parametrize("mounted", [False, True])
def test_vcuda_mounts_its_library_with_every_way(mounted: bool) -> None:
    """The library must be found before the driver's own, which an image may have in its cache."""
    share = Allocation(id="a", gpus={"g": SHARE}, mechanisms=("vcuda",))
    answer = core_answer(share, GPUS, host(mounted=mounted))
    assert set(driver_mounts(answer).values()) == {
        "/vdriver/nvidia",
        "/vdriver/nvidia/lib64",
        "/vdriver/nvidia/bin/nvidia-smi",
    }
    assert answer.envs["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
