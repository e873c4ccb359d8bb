"""A container that shares GPUs, with the limits that it asked for. This is all that enforcement knows about a container."""

from dataclasses import dataclass

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, GpuName
from gpumgr.ledger.ledger import AllocationId, describe_container
from gpumgr.placement.pods import USUAL_PRIORITY, PodKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a container is limited. This is decided at the grant and kept with the allocation: see Allocation."""

    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpu:
    """One GPU of a share, and the amounts granted on it: `cores` in percent of the GPU, `memory_bytes` of its `total_bytes`.

    The kubelet asks for cores and memory in two calls, in either order: each is 0 until its call, and both are known when the
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
        """The limit of cores; 100 is no limit. A container of `nvidia.com/gpu` may have memory without cores."""
        return self.cores or CORES_PER_GPU

    @property
    def whole(self) -> bool:
        """Whether the container has the whole GPU, so that nothing is limited there."""
        return self.cores >= CORES_PER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """A container that has a part of at least one GPU. A container that has only whole GPUs is not limited, so it has no share.

    `gpus` are in the order of their PCI bus ids, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID. The names and UIDs of the pod are
    None until they are known, and may be guesses before the container starts: the answer to Allocate does not depend on them.
    """

    allocation: AllocationId
    gpus: tuple[SharedGpu, ...]
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    #: The UID that the container runtime has for a static pod (the API server has the UID of its mirror pod); None for other pods.
    runtime_uid: str | None = None
    #: Annotation `tencent.com/vcuda-core-limit` of the pod, at most 100: the percent of a GPU that it may use while others are idle.
    core_limit: int | None = None
    #: The container's `nvidia.com/priority`: among containers on one GPU, a lower number has precedence.
    priority: int = USUAL_PRIORITY
    #: Whether the share belongs to a ResourceClaim, which several containers may use.
    claim: bool = False
    #: Whether a resize was granted: an earlier process of the agent may have ended before it changed the limits.
    resized: bool = False

    def only_gpu(self, mechanism: str) -> SharedGpu:
        """The container's only GPU, for a mechanism that limits on one GPU only. Raises Refusal if the container has several GPUs."""
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
