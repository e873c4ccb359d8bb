"""A container that shares a GPU, with the limits that it asked for: all that enforcement knows of it."""

from dataclasses import dataclass

from gpumgr.allocator.ledger import AllocationId, describe_container
from gpumgr.allocator.pods import PodKey
from gpumgr.units import GpuName


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is decided at a grant about a container's limits and kept with its allocation: see there."""

    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """One share: it lies on one GPU (containers with whole GPUs have no limits, so they are no tenants).

    The kubelet asks for cores and memory in two calls, in either order: `cores` (1..99, percent of the GPU) and `memory_bytes` are 0
    until their call has come, and both are known when the container starts. What names the pod is None until it is known, and may
    be a guess before the container starts: what Allocate answers depends on none of it.
    """

    allocation: AllocationId
    gpu: GpuName
    uuid: str
    minor: int | None = None
    bus_id: str | None = None
    gpu_memory_bytes: int | None = None
    cores: int = 0
    memory_bytes: int = 0
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    #: The UID by which the container runtime knows a static pod (the API server knows its mirror); None for all others.
    runtime_uid: str | None = None
    #: Annotation `tencent.com/vcuda-core-limit` of the pod, in percent, capped at 100: how far it may go while others are idle.
    core_limit: int | None = None

    def describe(self) -> str:
        """How messages call the container."""
        return describe_container(self.pod, self.pod_uid, self.container, self.allocation)
