"""What one sample says of everybody on the node's GPUs. Values only; `join` makes them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.pods import PodKey
from gpumgr.units import GpuName

#: An allocation on one of its GPUs. A share has one such place, a container with four whole GPUs has four.
Place = tuple[AllocationId, GpuName]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerUse:
    """What one container was granted on one GPU, and what its processes use there.

    `cores` are hundredths of this GPU. `memory_limit_bytes` is None for whole GPUs. `processes` maps the host's pid of each process
    with a context there to its bytes (None = the driver does not tell). `memory_bytes` is their sum; None = nothing is known of it.
    """

    allocation: AllocationId
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    gpu: GpuName
    uuid: str
    cores: int = 0
    memory_limit_bytes: int | None = None
    memory_bytes: int | None = None
    #: Share of the last period in which its kernels ran, 0..1; None = not asked, or the driver does not tell.
    utilization_ratio: float | None = None
    processes: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(self.processes))

    @property
    def process_count(self) -> int:
        return len(self.processes)

    def describe(self) -> str:
        """How messages call the container."""
        pod = "/".join(self.pod) if self.pod else (f"pod uid {self.pod_uid}" if self.pod_uid else f"allocation {self.allocation}")
        return f"{pod} ({self.container})" if self.container else pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A process on a GPU where no allocation lets it be. `container` says in which it runs; None = in none of the kubelet's."""

    gpu: GpuName
    uuid: str
    pid: int
    memory_bytes: int | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Sums over one GPU whose processes could be listed; bytes that the driver does not tell count 0."""

    uuid: str
    container_memory_bytes: int = 0
    container_processes: int = 0
    stranger_memory_bytes: int = 0
    stranger_processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """The whole node at one instant; `taken_at` is in monotonic seconds.

    `containers` has every allocation on every GPU that it was granted, also those without a process. `gpus` lacks those whose
    processes could not be listed. `unclear` are pids whose container is not known yet: they are nobody's and no strangers.
    """

    taken_at: float
    containers: Mapping[Place, ContainerUse] = field(default_factory=dict)
    strangers: Mapping[tuple[GpuName, int], Stranger] = field(default_factory=dict)
    gpus: Mapping[GpuName, GpuUse] = field(default_factory=dict)
    unclear: frozenset[int] = frozenset()

    def of(self, allocations: Collection[AllocationId]) -> "NodeUse":
        """Without the containers of other allocations."""
        if all(allocation in allocations for allocation, _ in self.containers):
            return self
        return replace(self, containers={place: use for place, use in self.containers.items() if place[0] in allocations})
