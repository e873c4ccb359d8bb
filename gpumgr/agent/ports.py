"""The interfaces that other packages implement for the agent; the agent imports none of these packages."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from gpumgr.common.units import GpuName, Process, Resource
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.gpu_share import EnforcementTerms, GpuShare
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Change
from gpumgr.ledger.node import NodeDevices
from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import Listing, PodKey, PodSandbox, PodView


class Checkpoint(Protocol):
    """Durable storage. If a method raises CheckpointError, nothing has changed."""

    async def save(self, change: Change) -> None: ...

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:
        """`entries` are about the note, and are written in the same transaction."""
        ...


class PodResources(Protocol):
    async def list(self) -> Listing:
        """All active pods with their device ids. Raises KubeletError."""
        ...


class Pods(Protocol):
    """This node's pods, from a cache."""

    @property
    def synced(self) -> bool: ...

    @property
    def reachable(self) -> bool:
        """Whether all pods are known and the API server has answered the last request. Then a pod that the cache lacks was deleted."""
        ...

    def get(self, pod: PodKey) -> PodView | None: ...

    def by_uid(self, uid: str) -> PodView | None: ...

    def all(self) -> Iterable[PodView]: ...

    async def wait_for(self, pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:
        """Returns the pod once the cache has it, or None after the timeout. Without `uid` an ended pod does not count, because an earlier
        pod may have had the same name."""
        ...

    async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:
        """Returns once these pods have ended or are deleted, or after the timeout."""
        ...


class Runtime(Protocol):
    async def ready_sandboxes(self) -> Collection[PodSandbox]:
        """The pods with a sandbox in the state READY. Raises CriError."""
        ...


class Enforcement(Protocol):
    """The limits of tenants (containers that share a GPU), and their part of the response to Allocate."""

    def terms(self, pod: PodView | None, *, share: bool, setting: str | None = None) -> EnforcementTerms:
        """How containers of this pod are limited. `pod` None: it is not certain which pod it is. `setting`: the mechanism that the claim's
        DeviceClass demands."""
        ...

    def answer(
        self, base: ContainerResponse, resource: Resource, allocation: Allocation, tenant: GpuShare | None
    ) -> ContainerResponse:
        """The response to one Allocate: `base` with what the limits need. `tenant` None: no limits. Depends on the arguments alone. Raises
        Refusal."""
        ...

    async def start(self, base: ContainerResponse, allocation: Allocation, tenant: GpuShare | None) -> None:
        """Call it before each start of the container. For a claim it may be called at any time, because it does not change the limits of
        running containers. `base`: the responses to all calls for the container, without the limits. Raises Refusal."""
        ...

    def intact_specs(self) -> Collection[AllocationId]:
        """The allocations with intact CDI specs on disk. Blocks for a few system calls."""
        ...

    async def vacate(self, uuids: Collection[str]) -> None:
        """Call it before a container gets these GPUs whole. Ends the backends' processes on them (MPS daemons). Raises Refusal."""
        ...


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    pod: PodKey
    reason: str


class Evictor(Protocol):
    """Requests evictions without waiting for them."""

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:
        """Replaces all evictions of this requester; a pod that no requester names is not evicted. `immediately`: also repeats recent
        evictions."""
        ...


class Meter(Protocol):
    def drifted(self, what: Literal["freed", "renamed", "adopted", "rejected"], count: int) -> None:
        """Counts allocations in which the ledger differed from the kubelet's state, by what became of them."""
        ...


#: tampered: the container changed its limits (they were corrected). unregistered: a process uses the GPU without the mechanism. broken: the
#: mechanism does not work here. over_limit: more memory is in use than was granted.
FindingCode = Literal["tampered", "unregistered", "broken", "over_limit"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem for the operator and the pod's owner; `message` is one sentence with what to do."""

    allocation: AllocationId
    code: FindingCode
    message: str


class RunningContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A running container with a share. `others`: further containers with the same ResourceClaim. `pids`: the host's ids of all processes
    in the containers' cgroups and below, ascending; `gpu_pids`: the processes that have a context on one of the GPUs. `memory_bytes`:
    GPU -> what the processes use there (None: not known)."""

    tenant: GpuShare
    container: Container
    pids: tuple[int, ...] = ()
    gpu_pids: frozenset[int] = frozenset()
    memory_bytes: Mapping[GpuName, int | None] = msgspec.field(default_factory=dict)
    others: tuple[Container, ...] = ()

    @property
    def containers(self) -> tuple[Container, ...]:
        return (self.container, *self.others)


#: Receives each device list for the kubelet.
Publish = Callable[[NodeDevices], None]
#: Whether this process still runs on the host.
Runs = Callable[[Process], bool]
