"""What every mechanism implements. Adding one is one module with its settings, and a line where the backends are made.

The life of a tenant: `prepare` at Allocate, then for every start of its container `start`; while it runs, `observe` and `adjust` once
a second; `cleanup` when its allocation is gone and no process is left. The agent may end and begin anew at any point between: what
must survive is on disk or in processes of its own, and `recover` finds it again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.units import Kind
from gpumgr.usage.containers import Container

BackendName = Literal["mps", "mps-open", "hami-core", "vcuda", "nvml-memory", "none"]

#: tampered: the container changed what is not its to change (and it was repaired). unregistered: a process uses the GPU past the
#: mechanism. broken: the mechanism does not work for this container. over_limit: more memory is in use than was granted.
FindingCode = Literal["tampered", "unregistered", "broken", "over_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the operator and the pod's owner should know; `message` is one sentence with what to do."""

    allocation: AllocationId
    code: FindingCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A tenant whose container runs. `pids` are the host's, of all processes in its cgroup and below, ascending.

    `gpu_processes`: those of them that have a context on its GPU -> bytes in use there (None = the driver does not tell).
    """

    tenant: Tenant
    container: Container
    pids: tuple[int, ...] = ()
    gpu_processes: Mapping[int, int | None] = field(default_factory=dict)
    utilization_ratio: float | None = None


class Backend(Protocol):
    """One mechanism. Nothing here blocks the event loop for longer than a small file takes; coroutines may run side by side for
    different tenants, `start` and `cleanup` of one tenant never do."""

    @property
    def name(self) -> BackendName: ...

    @property
    def limits(self) -> frozenset[Kind]:
        """What it can keep: "core", "memory", or both."""
        ...

    async def unavailable(self) -> str | None:
        """Why this node can't carry it and what to do about it; None if it can."""
        ...

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """What the container gets with this kind of ids: the core call brings everything except what depends on the memory's
        size, which the memory call brings. Pure: the same tenant gives the same answer, whoever the pod is."""
        ...

    async def start(self, tenant: Tenant) -> None:
        """The container is about to start (again): puts what it needs on disk, fresh. Raises Refusal; the kubelet tries again."""
        ...

    async def vacate(self, uuids: Collection[str]) -> None:
        """Before a container gets these GPUs for itself: nothing of this backend may stand in its way. Raises Refusal."""
        ...

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        """Looks, without changing anything, at this backend's tenants that run."""
        ...

    async def adjust(self, running: Sequence[Running]) -> None:
        """Brings what has drifted back to what the tenants were granted."""
        ...

    def remains(self) -> Collection[AllocationId]:
        """Allocations that something of this backend is kept for."""
        ...

    async def cleanup(self, allocation: AllocationId) -> None:
        """Removes what was kept; the allocation is gone and no process uses it any more."""
        ...

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        """After a start of the agent: takes over what an earlier life left for these tenants (all of this backend)."""
        ...

    def own_pids(self) -> Collection[int]:
        """The host's pids of this backend's own processes, which may have contexts on GPUs. Reads /proc; called on a thread."""
        ...

    async def close(self) -> None:
        """The agent ends; containers and their limits go on."""
        ...
