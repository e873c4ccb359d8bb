"""What a container gets for MPS: the answer to Allocate. Pure: it depends on the tenant, the protocol and the paths alone.

The pipe folder has the same path in the container as on the host, for all clients of a daemon must call it by the daemon's own name
(NVIDIA's documentation on CUDA_MPS_PIPE_DIRECTORY). It is mounted read-only, as NVIDIA's container toolkit does: sockets and pipes
work there, and a container that runs as root can't plant links where the daemon, root on the host, opens its files next time.

In protocol 3 only the folder of the container's own namespace is mounted. The socket chooses the limits, so the container can't
choose others.

/dev/shm: the CUDA driver's client and server share memory there, and NVIDIA's device plugin gives both the same small tmpfs; so does
gpumgr, one for each GPU, which is all the shared memory that the GPU's containers have. A pod that mounts a volume of its own at
/dev/shm keeps that volume: the kubelet lists the pod's mounts after a device plugin's, and the last one covers the others. Its
processes and the server then share no memory. NVIDIA's guide to protocol 3 shows clients like that; for protocol 2 it is not known
to work.

The pod's annotation vcuda-core-limit is not honoured: MPS has no limit that yields while others are idle.
"""

from collections.abc import Collection
from pathlib import Path

from gpumgr.allocator.response import ContainerResponse, Mount
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.mps.commands import Protocol
from gpumgr.enforcement.mps.folders import GpuFolder
from gpumgr.units import Kind


def answer(tenant: Tenant, kind: Kind, protocol: Protocol, limits: Collection[Kind], root: Path) -> ContainerResponse:
    """`root` holds one folder for each GPU; `limits` are what MPS is to keep."""
    if kind == "memory":
        return _memory(tenant, protocol, limits)
    folder = GpuFolder(root / tenant.uuid)
    pipe = folder.pipe if protocol == 2 else folder.namespace(tenant.allocation)
    envs = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    if protocol == 2 and "core" in limits:
        envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(tenant.cores)
    mounts = (
        Mount(container_path=str(pipe), host_path=str(pipe), read_only=True),
        Mount(container_path="/dev/shm", host_path=str(folder.shm)),
    )
    return ContainerResponse(envs=envs, mounts=mounts)


def _memory(tenant: Tenant, protocol: Protocol, limits: Collection[Kind]) -> ContainerResponse:
    """The GPU is called 0, its index behind the daemon: one entry for a GPU that is not visible would void the limit."""
    if protocol == 3 or "memory" not in limits:
        return ContainerResponse()
    return ContainerResponse(envs={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={tenant.memory_bytes >> 20}M"})
