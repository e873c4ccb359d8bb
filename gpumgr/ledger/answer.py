"""The response to Allocate: devices, environment, mounts and annotations of one container.

It depends on the allocation and the host, not on the pod. As in gpu-manager, the response for `tencent.com/vcuda-core` has everything, and
the one for `tencent.com/vcuda-memory` has only an annotation.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_BYTES, CORE_RESOURCE, MEMORY_RESOURCE, Amounts, GpuName
from gpumgr.ledger.ids import count
from gpumgr.ledger.ledger import Allocation, MigDevice


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    container_path: str
    host_path: str
    read_only: bool = False


class DeviceNode(msgspec.Struct, frozen=True, kw_only=True):
    """`permissions`: some of the letters "rwm" (read, write, mknod)."""

    container_path: str
    host_path: str
    permissions: str = "rwm"


class ContainerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet adds to one container for one resource; `cdi_devices` are names like "vendor/class=name". If the responses for two
    resources of a container have the same key, the kubelet uses the first one."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def merged(first: ContainerResponse, *others: ContainerResponse) -> ContainerResponse:
    """One response with all contents. The later value of a variable, annotation or container path counts."""
    every = (first, *others)
    return ContainerResponse(
        envs={key: value for each in every for key, value in each.envs.items()},
        mounts=tuple({mount.container_path: mount for each in every for mount in each.mounts}.values()),
        devices=tuple({node.container_path: node for each in every for node in each.devices}.values()),
        annotations={key: value for each in every for key, value in each.annotations.items()},
        cdi_devices=tuple(dict.fromkeys(name for each in every for name in each.cdi_devices)),
    )


LIBRARY_PATH = "/usr/local/nvidia"
#: In these folders glibc finds libraries in every image for x86-64, even without LD_LIBRARY_PATH and ld.so.cache. Images normally do not
#: have them. glibc 2.33 and later look into `glibc-hwcaps`, glibc before 2.37 into `tls`. Source: ld.so(8), "Hardware capabilities".
LOADER_PATHS = tuple(
    f"/usr/{folder}/{below}" for below in ("glibc-hwcaps/x86-64-v2", "tls") for folder in ("lib/x86_64-linux-gnu", "lib64")
)
#: In the PATH of every image.
SMI_PATH = "/usr/bin/nvidia-smi"
ALLOCATION_PATH = "/etc/vcuda"
DEVICE_ANNOTATION = "tencent.com/vcuda-device"
#: Names of the container's mechanisms, joined by "+".
ENFORCEMENT_ANNOTATION = "gpumgr.io/enforcement"
#: A `Granted` as JSON.
GRANTED_ANNOTATION = "gpumgr.io/granted"
CONTROL_NODES = ("nvidiactl", "nvidia-uvm")
#: WSL2's only device node, for all GPUs, which have no minor numbers there. Source: NVIDIA's CUDA on WSL user guide.
WSL_NODE = "dxg"
#: The mechanism that puts a library in the place of the driver's libcuda.
VCUDA = "vcuda"
#: With this value of NVIDIA_VISIBLE_DEVICES, NVIDIA's container runtime adds nothing. Source: NVIDIA Container Toolkit,
#: docker-specialized.md.
NO_DEVICES = "void"


class DriverAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How containers get the driver's files. `mounted`: gpumgr mounts them from the host; otherwise NVIDIA's container toolkit adds them.
    `toolkit`: NVIDIA's container runtime may be configured on this node. `why`: a clause for messages."""

    mounted: bool = True
    toolkit: bool = False
    why: str = ""


class HostPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Device nodes and driver files for which `exists` is false are omitted from responses. `mig_minors` returns the driver's list of the
    capabilities of MIG devices, empty if it has none. `machine`: platform.machine()."""

    exists: Callable[[str], bool]
    mig_minors: Callable[[], str] = str
    driver_access: Callable[[], DriverAccess] = DriverAccess
    device_root: str = "/dev"
    share_driver_dir: str = ""
    whole_driver_dir: str = ""
    allocation_dir: str = "/etc/gpu-manager/vm"
    machine: str = "x86_64"
    extra_devices: tuple[str, ...] = ()


class Granted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rebuild of the ledger must know of an allocation with replicas (`nvidia.com/gpu`)."""

    gpus: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    limits: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    mig_devices: tuple[MigDevice, ...] = ()


class GrantedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`minor` None: the driver does not report it, so the GPU has no device node. `instances`: UUID of a MIG device -> ids of its GPU
    instance and compute instance."""

    uuid: str
    minor: int | None
    instances: Mapping[str, tuple[int, int]] = msgspec.field(default_factory=dict)


def core_answer(allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], host: HostPaths) -> ContainerResponse:
    granted = [gpus[name] for name in allocation.gpus]
    nodes = [f"nvidia{gpu.minor}" for gpu in granted if gpu.minor is not None]
    common = [WSL_NODE] * (len(nodes) < len(granted)) + [*CONTROL_NODES]
    paths = [*(f"{host.device_root}/{name}" for name in (*nodes, *common)), *host.extra_devices]
    driver = _driver_mounts(allocation, host)
    folder = f"{host.allocation_dir}/{allocation.id}"
    return ContainerResponse(
        envs=_driver_variables(allocation, host, [gpu.uuid for gpu in granted], mounted=bool(driver)),
        mounts=(*driver, Mount(container_path=ALLOCATION_PATH, host_path=folder, read_only=True)),
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


def _driver_mounts(allocation: Allocation, host: HostPaths) -> tuple[Mount, ...]:
    """vcuda's library replaces the driver's, so vcuda always needs the driver's files. The host's folder is a symbolic link, so
    the container gets at each start the files of the driver that is loaded then."""
    by_vcuda = VCUDA in allocation.mechanisms
    folder = host.share_driver_dir if by_vcuda else host.whole_driver_dir
    if not folder or not (by_vcuda or host.driver_access().mounted):
        return ()
    places = {LIBRARY_PATH: "", **dict.fromkeys(LOADER_PATHS, "/lib64"), SMI_PATH: "/bin/nvidia-smi"}
    return tuple(
        Mount(container_path=path, host_path=folder + below, read_only=True)
        for path, below in places.items()
        if host.exists(folder + below)
    )


def _driver_variables(allocation: Allocation, host: HostPaths, devices: Sequence[str], *, mounted: bool) -> Mapping[str, str]:
    """`devices`: UUIDs of GPUs or MIG devices. `mounted`: the driver's files are mounted. LD_LIBRARY_PATH is set for vcuda, so that its
    library is found first, and on machines on which glibc does not search LOADER_PATHS. NVIDIA_VISIBLE_DEVICES=void keeps NVIDIA's toolkit
    from adding mounted files again."""
    named = mounted and (VCUDA in allocation.mechanisms or host.machine != "x86_64")
    path = {"LD_LIBRARY_PATH": f"{LIBRARY_PATH}/lib64"} if named else {}
    hidden = mounted and host.driver_access().toolkit
    return {**path, "NVIDIA_VISIBLE_DEVICES": NO_DEVICES if hidden else ",".join(devices)}


def replica_answer(allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], host: HostPaths) -> ContainerResponse:
    """The response for `nvidia.com/gpu`. Its annotation keeps amounts and MIG devices for a rebuild of the ledger."""
    granted = Granted(gpus=allocation.gpus, limits=allocation.limits, mig_devices=allocation.mig_devices)
    annotations = {GRANTED_ANNOTATION: msgspec.json.encode(granted).decode()}
    if not allocation.mig_devices:
        return replace(core_answer(allocation, gpus, host), annotations=annotations)
    places = {each.uuid: (each.gpu, each.gpu_instance, each.compute_instance) for each in allocation.mig_devices}
    return replace(_of_instances(allocation, gpus, places, host), annotations=annotations)


def instance_answer(
    allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], uuids: Sequence[str], host: HostPaths
) -> ContainerResponse:
    """The response for the MIG devices `uuids`. Raises Refusal if a device is gone. Source for `mig_minors` and the device nodes: NVIDIA's
    MIG user guide, device nodes and capabilities."""
    places = {uuid: (name, *ids) for name in allocation.gpus for uuid, ids in gpus[name].instances.items()}
    if gone := [uuid for uuid in uuids if uuid not in places]:
        raise Refusal("gpu_unhealthy", f"the MIG device {gone[0]} no longer exists; delete the pod and create it again")
    return _of_instances(allocation, gpus, {uuid: places[uuid] for uuid in uuids}, host)


def _of_instances(
    allocation: Allocation, gpus: Mapping[GpuName, GrantedGpu], places: Mapping[str, tuple[GpuName, int, int]], host: HostPaths
) -> ContainerResponse:
    """`places`: UUID -> GPU, ids of the GPU instance and the compute instance."""
    numbers = dict(line.split() for line in host.mig_minors().splitlines() if len(line.split()) == 2)
    paths = []
    for gpu, gpu_instance, compute_instance in places.values():
        part = f"gpu{gpus[gpu].minor}/gi{gpu_instance}"
        found = [numbers.get(f"{part}/{name}access") for name in ("", f"ci{compute_instance}/")]
        paths += [f"{host.device_root}/nvidia-caps/nvidia-cap{number}" for number in found if number is not None]
    full = core_answer(allocation, gpus, replace(host, extra_devices=(*host.extra_devices, *paths)))
    mounted = any(mount.container_path == LIBRARY_PATH for mount in full.mounts)
    return replace(full, envs=_driver_variables(allocation, host, [*places], mounted=mounted), annotations={})


def memory_answer(allocation: Allocation) -> ContainerResponse:
    """The annotation has bytes, as in gpu-manager."""
    return ContainerResponse(annotations={MEMORY_RESOURCE: str(count(allocation.held("memory")) * BLOCK_BYTES)})


def allocation_id_in(mounts: Mapping[str, str]) -> str | None:
    """`mounts`: container path -> host path, of an earlier response."""
    folder = mounts.get(ALLOCATION_PATH)
    return folder.rstrip("/").rpartition("/")[2] or None if folder else None


def mechanisms_in(annotations: Mapping[str, str]) -> tuple[str, ...]:
    text = annotations.get(ENFORCEMENT_ANNOTATION)
    return tuple(text.split("+")) if text else ()


def _inside(path: str, host: HostPaths) -> str:
    return "/dev" + path.removeprefix(host.device_root) if path.startswith(host.device_root + "/") else path
