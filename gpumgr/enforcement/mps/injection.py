"""The answer to Allocate for MPS. Pure: it depends on the container, the protocol and the paths alone.

The pipe folder has the same path in the container as on the host, because all clients of a daemon must use the daemon's own path
(NVIDIA's documentation on CUDA_MPS_PIPE_DIRECTORY). It is mounted read-only, as NVIDIA's container toolkit does: sockets and pipes
work there, and root in a container can't make links where the daemon, which is root on the host, opens its files next time.

In protocol 3 only the folder of the container's own namespace is mounted. The socket determines the limits, so the container can't
select others.

/dev/shm: client and server of the CUDA driver share memory there, and NVIDIA's device plugin gives both the same small tmpfs. gpumgr
does the same with one tmpfs for each GPU, which is all the shared memory of the GPU's containers. A pod that mounts a volume of its own
at /dev/shm keeps that volume: the kubelet lists the pod's mounts after those of a device plugin, and the last mount covers the others.
Its processes and the server then share no memory. NVIDIA's guide to protocol 3 shows such clients; for protocol 2 it is not known
whether they work.

The pod's annotation vcuda-core-limit has no effect: MPS has no limit that is lifted while other containers are idle.
"""

from collections.abc import Collection
from pathlib import Path

from gpumgr.common.units import Resource
from gpumgr.enforcement.mps.commands import MpsProtocol
from gpumgr.enforcement.mps.folders import GpuFolder
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.response import ContainerResponse, Mount


def answer(
    tenant: GpuShare, kind: Resource, protocol: MpsProtocol, limits: Collection[Resource], root: Path
) -> ContainerResponse:
    """`root` has one folder for each GPU; `limits` are the resources that MPS limits. Raises Refusal for a container with several GPUs:
    a GPU has its own daemon, and a process uses one daemon."""
    gpu = tenant.only_gpu("MPS")
    if kind == "memory":
        # The GPU has the index 0 at the daemon. An entry for a GPU that is not visible would make the limit void.
        limited = protocol == 2 and "memory" in limits
        return ContainerResponse(envs={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={gpu.memory_bytes >> 20}M"} if limited else {})
    folder = GpuFolder(root / gpu.uuid)
    pipe = folder.pipe if protocol == 2 else folder.namespace(tenant.allocation)
    envs = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    if protocol == 2 and "core" in limits:
        envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(gpu.core_percent)
    mounts = (
        Mount(container_path=str(pipe), host_path=str(pipe), read_only=True),
        Mount(container_path="/dev/shm", host_path=str(folder.shm)),
    )
    return ContainerResponse(envs=envs, mounts=mounts)
