"""A container that shares GPUs, with the limits that it asked for: all that enforcement knows of it."""

from dataclasses import dataclass

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, GpuName
from gpumgr.ledger.ledger import AllocationId, describe_container
from gpumgr.ledger.pods import USUAL_PRIORITY, PodKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is decided at a grant about a container's limits and kept with its allocation: see there."""

    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpu:
    """One GPU of a share, and the amounts granted on it: `cores` in percent of the GPU, `memory_bytes` of its `total_bytes`.

    The kubelet asks for cores and memory in two calls, in either order: each is 0 until its call has come, and both are known when the
    container starts. `burst_bytes`: how much more memory it may use now (annotation `gpumgr.io/memory-limit`). `bus_id` and `total_bytes`
    are None while the driver does not show the GPU.
    """

    name: GpuName
    uuid: str
    bus_id: str | None = None
    total_bytes: int | None = None
    cores: int = 0
    memory_bytes: int = 0
    burst_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        """The limit of memory that is in force now."""
        return self.memory_bytes + self.burst_bytes

    @property
    def core_percent(self) -> int:
        """The limit of cores; 100 is none. A container of `nvidia.com/gpu` may have memory without cores."""
        return self.cores or CORES_PER_GPU

    @property
    def whole(self) -> bool:
        """The container has the whole GPU, so nothing is limited there."""
        return self.cores >= CORES_PER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """A container that has a part of at least one GPU (containers with whole GPUs only have no limits, so they are no tenants).

    `gpus` are in the order of their PCI bus ids, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID. What names the pod is None
    until it is known, and may be a guess before the container starts: what Allocate answers depends on none of it.
    """

    allocation: AllocationId
    gpus: tuple[SharedGpu, ...]
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    #: The UID by which the container runtime knows a static pod (the API server knows its mirror); None for all others.
    runtime_uid: str | None = None
    #: Annotation `tencent.com/vcuda-core-limit` of the pod, in percent, capped at 100: how far it may go while others are idle.
    core_limit: int | None = None
    #: By `nvidia.com/priority` of the container: of those on one GPU a lower number comes first.
    priority: int = USUAL_PRIORITY
    #: It is of a ResourceClaim, which other containers may use, too.
    claim: bool = False

    def only_gpu(self, mechanism: str) -> SharedGpu:
        """The GPU, for a mechanism that serves a container on one GPU. Raises Refusal for a container with several."""
        if len(self.gpus) != 1:
            raise Refusal(
                "internal",
                f"{mechanism} limits a container on one GPU only, and {self.describe()} shares {len(self.gpus)} GPUs: "
                "request a share of one GPU, or set enforcement.backend to hami-core",
            )
        return self.gpus[0]

    def describe(self) -> str:
        """How messages call the container."""
        return describe_container(self.pod, self.pod_uid, self.container, self.allocation)
