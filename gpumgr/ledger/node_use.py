"""The use of the node's GPUs in one sample; `join` makes these values."""

from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName
from gpumgr.ledger.ledger import AllocationId, describe_container
from gpumgr.placement.pods import PodKey, is_static_uid

#: An allocation on one of its GPUs. A container with four whole GPUs has four such pairs.
AllocationOnGpu = tuple[AllocationId, GpuName]


class TurnUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a container used its turns on one GPU. A turn is a time in which the limiter's arbiter lets it run kernels. The figures are
    counted since the agent knows the container.

    `held_seconds`: the GPU time that was charged to it. `waited_seconds`: how long it had no turn while one of its threads waited for one.
    `overruns`: turns that the arbiter ended while its work still ran. `memory_bytes_by_kind`: kind of CUDA allocation -> what its processes
    hold, without zeros. `held_ratio`, `waited_ratio`: its part of the last ten seconds, 0..1; None: not known yet, or launches need no
    turn.
    """

    held_seconds: float
    waited_seconds: float
    launches: int
    overruns: int
    memory_bytes_by_kind: Mapping[str, int] = msgspec.field(default_factory=dict)
    held_ratio: float | None = None
    waited_ratio: float | None = None


class ContainerUse(msgspec.Struct, frozen=True, kw_only=True):
    """A container's grant on one GPU, and the use of the GPU by its processes.

    `cores` are hundredths of this GPU. `memory_request_bytes` is guaranteed: the grant, or the size after a resize. `memory_limit_bytes` is
    the most that the container may use, which is more with a burst. Both are None for whole GPUs. `processes`: the host's pid -> its bytes
    (None = not reported). `memory_bytes` is their sum; None = unknown, and then the processes may be unknown, too.
    """

    allocation: AllocationId
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    gpu: GpuName
    uuid: str
    cores: int = 0
    memory_request_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_bytes: int | None = None
    #: The part of the last sample period in which its kernels ran, 0..1; None = not sampled, or not reported.
    utilization_ratio: float | None = None
    processes: Mapping[int, int | None] = msgspec.field(default_factory=dict)
    #: None: the limiter does not limit the container.
    turns: TurnUse | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(self.processes))

    @property
    def process_count(self) -> int | None:
        """None = unknown."""
        return None if self.memory_bytes is None and not self.processes else len(self.processes)

    def describe(self) -> str:
        return describe_container(self.pod, self.pod_uid, self.container, self.allocation)


class UnattributedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a GPU without an allocation of it. `container` None: in no container of the kubelet."""

    gpu: GpuName
    uuid: str
    pid: int
    memory_bytes: int | None = None
    container: str | None = None


class UnattributedSum(msgspec.Struct, frozen=True, kw_only=True):
    """The unattributed processes on a GPU; None: not known. The memory is also None if the driver reports it for no process."""

    processes: int | None = 0
    memory_bytes: int | None = 0


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole node at one instant. `containers` has every allocation on every GPU that it was granted, even without a process. `gpus`
    lacks GPUs without a readable process list. `unknown`: (GPU, pid) of processes in containers that are not known yet."""

    containers: Mapping[AllocationOnGpu, ContainerUse] = msgspec.field(default_factory=dict)
    unattributed: Mapping[tuple[GpuName, int], UnattributedProcess] = msgspec.field(default_factory=dict)
    gpus: Mapping[GpuName, UnattributedSum] = msgspec.field(default_factory=dict)
    unknown: frozenset[tuple[GpuName, int]] = frozenset()

    def of(self, allocations: Collection[AllocationId]) -> "NodeUse":
        if all(allocation in allocations for allocation, _ in self.containers):
            return self
        return replace(self, containers={place: use for place, use in self.containers.items() if place[0] in allocations})


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One started container. `attempt` counts its restarts from 0. `cgroup`: the path in the hierarchy that counts its memory (v2: the
    unified one), with a leading slash; None: unknown. `pid`: the host's pid of its first process; None if it does not run."""

    id: str
    pod: PodKey
    pod_uid: str
    name: str
    attempt: int = 0
    running: bool = True
    pid: int | None = None
    cgroup: str | None = None
    created_at: float = 0.0

    @property
    def static(self) -> bool:
        return is_static_uid(self.pod_uid)

    def describe(self) -> str:
        if not self.name:
            return f"container {self.id[:12]} of pod uid {self.pod_uid}"
        return f"{'/'.join(self.pod)} ({self.name})"
