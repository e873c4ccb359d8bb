"""The response to Allocate: devices, environment, mounts and annotations of one container.

It depends on the allocation alone, not on the pod (design: state is keyed by allocation). As in gpu-manager, the core call's response
has everything but the annotation `tencent.com/vcuda-memory`, which the memory call's has.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpumgr.allocator.ids import count
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.response import ContainerResponse, DeviceNode, Mount
from gpumgr.units import BLOCK_BYTES, CORE_RESOURCE, MEMORY_RESOURCE, Amounts, GpuName

LIBRARY_PATH = "/usr/local/nvidia"
ALLOCATION_PATH = "/etc/vcuda"
DEVICE_ANNOTATION = "tencent.com/vcuda-device"
#: Names of the container's mechanisms, joined by "+".
ENFORCEMENT_ANNOTATION = "gpumgr.io/enforcement"
#: GPU=cores,MiB of each GPU, separated by ";"; with /cores,MiB the limits, where they differ from what counts.
AMOUNTS_ANNOTATION = "gpumgr.io/amounts"
CONTROL_NODES = ("nvidiactl", "nvidia-uvm")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPaths:
    """Host paths of what a container gets. Paths for which `exists` is false are omitted from the response."""

    exists: Callable[[str], bool]
    device_root: str = "/dev"
    share_driver_dir: str = ""
    whole_driver_dir: str = ""
    allocation_dir: str = "/etc/gpu-manager/vm"
    extra_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedGpu:
    """The identifiers of a GPU in a response. `minor` None: the driver does not report it, so the GPU has no device node."""

    uuid: str
    minor: int | None


def core_answer(allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], host: HostPaths) -> ContainerResponse:
    """Response to the core call; `gpus` has at least the granted ones."""
    granted = [gpus[name] for name in allocation.gpus]
    nodes = [f"nvidia{gpu.minor}" for gpu in granted if gpu.minor is not None]
    control = [f"{host.device_root}/{name}" for name in CONTROL_NODES]
    paths = [*(f"{host.device_root}/{name}" for name in nodes), *control, *host.extra_devices]
    driver_dir = host.whole_driver_dir if allocation.whole else host.share_driver_dir
    mounts = (
        [Mount(container_path=LIBRARY_PATH, host_path=driver_dir, read_only=True)]
        if driver_dir and host.exists(driver_dir)
        else []
    )
    folder = f"{host.allocation_dir}/{allocation.id}"
    return ContainerResponse(
        envs={
            "LD_LIBRARY_PATH": f"{LIBRARY_PATH}/lib64",
            "NVIDIA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in granted),
        },
        mounts=(*mounts, Mount(container_path=ALLOCATION_PATH, host_path=folder, read_only=True)),
        devices=tuple(
            DeviceNode(container_path=_inside(path, host), host_path=path, permissions="rw")
            for path in dict.fromkeys(paths)
            if host.exists(path)
        ),
        annotations={
            CORE_RESOURCE: str(count(allocation.held("core"))),
            DEVICE_ANNOTATION: ",".join(f"/dev/{name}" for name in nodes),
        },
    )


def replica_answer(allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], host: HostPaths) -> ContainerResponse:
    """Response to the call for `nvidia.com/gpu`. As in HAMi the container's LD_LIBRARY_PATH is its own, unless the driver's files are
    mounted; the amounts are kept for a rebuild of the ledger."""
    full = core_answer(allocation, gpus, host)
    driver = set[str]() if any(mount.container_path == LIBRARY_PATH for mount in full.mounts) else {"LD_LIBRARY_PATH"}
    amounts = (
        f"{gpu}={each.cores},{each.memory_mebibytes}"
        + (f"/{limit.cores},{limit.memory_mebibytes}" if (limit := allocation.limits.get(gpu)) else "")
        for gpu, each in allocation.gpus.items()
    )
    return replace(
        full,
        envs={name: value for name, value in full.envs.items() if name not in driver},
        annotations={AMOUNTS_ANNOTATION: ";".join(amounts)},
    )


def amounts_in(annotations: Mapping[str, str]) -> tuple[Mapping[GpuName, Amounts], Mapping[GpuName, Amounts]]:
    """Amounts and limits in the annotations of an earlier response of `replica_answer`; empty if there are none."""
    number = "([0-9]{1,10})"
    text = annotations.get(AMOUNTS_ANNOTATION, "")
    found = [*re.finditer(rf"([0-9a-z]+)={number},{number}(?:/{number},{number})?(?:;|$)", text)]
    limited = [each for each in found if each[4] is not None]
    return (
        {each[1]: Amounts(int(each[2]), int(each[3])) for each in found},
        {each[1]: Amounts(int(each[4]), int(each[5])) for each in limited},
    )


def memory_answer(allocation: Allocation) -> ContainerResponse:
    """Response to the memory call, in bytes as in gpu-manager."""
    return ContainerResponse(
        envs={}, mounts=(), devices=(), annotations={MEMORY_RESOURCE: str(count(allocation.held("memory")) * BLOCK_BYTES)}
    )


def allocation_id_in(mounts: Mapping[str, str]) -> str | None:
    """The allocation id in the mounts (container path -> host path) of an earlier response, from the kubelet's checkpoint."""
    folder = mounts.get(ALLOCATION_PATH)
    return folder.rstrip("/").rpartition("/")[2] or None if folder else None


def mechanisms_in(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """The mechanisms in the annotations of an earlier response."""
    text = annotations.get(ENFORCEMENT_ANNOTATION)
    return tuple(text.split("+")) if text else ()


def _inside(path: str, host: HostPaths) -> str:
    """Path in the container: below the standard /dev, independent of the host's device root."""
    return "/dev" + path.removeprefix(host.device_root) if path.startswith(host.device_root + "/") else path
