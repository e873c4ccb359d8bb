"""What the agent needs of the world. Stations implement these; nothing in the agent imports a station."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, Protocol

from gpumgr.allocator.gpu_share import GpuShare, Terms
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Allocation, Change
from gpumgr.allocator.listing import Listing
from gpumgr.allocator.node_devices import NodeDevices
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.allocator.quarantine import Process
from gpumgr.allocator.response import ContainerResponse
from gpumgr.units import Resource


class Checkpoint(Protocol):
    """Durable memory. Both raise CheckpointError, and then nothing was changed."""

    async def save(self, change: Change) -> None: ...

    async def save_note(self, key: str, value: str, entries: Sequence[Entry] = ()) -> None:
        """`entries` are what the history tells of it, in the same transaction."""
        ...


class PodResources(Protocol):
    """The kubelet's PodResources API."""

    async def list(self) -> Listing:
        """All active pods with their device ids. Raises KubeletError."""
        ...


class Pods(Protocol):
    """This node's pods as the API server has them, out of memory."""

    @property
    def synced(self) -> bool: ...

    def get(self, pod: PodKey) -> PodView | None: ...

    def by_uid(self, uid: str) -> PodView | None: ...

    def all(self) -> Iterable[PodView]: ...

    async def wait_for(self, pod: PodKey, timeout_seconds: float) -> PodView | None: ...


class Enforcement(Protocol):
    """Limits of containers that share a GPU, and the way in which containers get what they are given."""

    def terms(self, pod: PodView | None, *, share: bool) -> Terms:
        """For a container of this pod (None = which pod it is is not sure)."""
        ...

    def answer(
        self, base: ContainerResponse, resource: Resource, allocation: Allocation, tenant: GpuShare | None
    ) -> ContainerResponse:
        """The answer to one Allocate: `base` with what the limits need. `tenant` None: no limits. Depends on the arguments alone.
        Raises Refusal."""
        ...

    async def start(self, base: ContainerResponse, allocation: Allocation, tenant: GpuShare | None) -> None:
        """The container is about to start (again). `base`: what both its calls were answered beside the limits. Raises Refusal."""
        ...

    async def vacate(self, uuids: Collection[str]) -> None:
        """A container with these GPUs for itself is about to start. Raises Refusal."""
        ...


class Meter(Protocol):
    """Counts what happened."""

    def drifted(self, what: Literal["freed", "renamed", "adopted", "rejected"], count: int) -> None: ...


#: Receives each new offer for the kubelet, already debounced.
Publish = Callable[[NodeDevices], None]
#: True while this very process runs on the host.
Runs = Callable[[Process], bool]
