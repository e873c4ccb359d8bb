"""The interface of an enforcement mechanism, and the backend "none", which limits nothing. A new mechanism is a module with its settings,
and a line where the backends are constructed.

Calls for one container: `prepare` at Allocate; `start` before every start of the container; `observe` and `adjust` once a second while
it runs; `cleanup` when its allocation is gone and it has no process. The agent may end and start again at any point: what must survive
is on disk or in separate processes, and `recover` takes it over.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

from gpumgr.agent.ports import Finding, FindingCode, RunningContainer
from gpumgr.common.units import Resource
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.gpu_limits import Strength
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.history import NOT_ENFORCED, HistoryEntry
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.usage.node_use import AllocationOnGpu, TurnUse

BackendName = Literal["limiter", "mps", "mps-open", "hami-core", "vcuda", "nvml-memory", "none"]


class Backend:
    """One mechanism. A subclass overrides the methods that it needs. No method blocks the event loop for longer than reading or writing a
    small file takes. Coroutines run concurrently for different containers, but never `start` and `cleanup` of one container. `limits`: what
    the mechanism limits on this node, and how strongly; each call of `unavailable` may change it. `adjustable`: `observe` or `adjust`
    can change the limits of a running container."""

    name: BackendName
    limits: Mapping[Resource, Strength]
    adjustable: bool = False

    async def unavailable(self) -> str | None:
        """Why this node can't use it and what to do; None if it can."""
        return None

    async def settle(self) -> bool:
        """Waits for the end of a trial of the mechanism that `unavailable` started; returns whether there was one."""
        return False

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:  # noqa: ARG002
        """The backend's part of the answer to Allocate for this resource. The answer for cores has everything that does not depend on the
        amount of memory. Pure: it depends on the tenant alone. Raises Refusal."""
        return ContainerResponse()

    async def start(self, tenant: GpuShare) -> None:
        """Writes the container's files again, before each start of the container. Raises Refusal; the kubelet retries."""

    async def vacate(self, uuids: Collection[str]) -> None:
        """Ends this backend's use of these GPUs, before a container gets them exclusively. Raises Refusal."""

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:  # noqa: ARG002
        """Checks the running containers of this backend. It compares each limit with what was granted, before anything changes that
        limit."""
        return ()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:  # noqa: ARG002
        """Restores limits that differ from what was granted. Returns why the memory limit of a container could not be set; its former
        limit may be in force. A backend without `bursts` may leave containers out."""
        return {}

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        """How the containers of this backend used their turns; empty for a mechanism without turns."""
        return {}

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:  # noqa: ARG002
        """From now on holds the container's calls of CUDA outside of the driver, or no longer. False: it can't."""
        return False

    def holds_calls(self, allocation: AllocationId) -> bool:  # noqa: ARG002
        return False

    def asks_for_resume(self, allocation: AllocationId) -> bool:  # noqa: ARG002
        """Whether a call of the container waits because its calls are held."""
        return False

    def remains(self) -> Collection[AllocationId]:
        """Allocations that have files or other state of this backend. Raises OSError."""
        return ()

    async def cleanup(self, allocation: AllocationId) -> None:
        """Removes the state of an allocation that is gone and has no process. Raises GpumgrError, OSError."""

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        """Takes over the state of these containers after a start of the agent. All of them have this backend."""

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:  # noqa: ARG002
        """Ends what no container needs. Called after each end of a container, and when the returned time has passed. `known` returns the
        allocations that exist at present. Returns the seconds until it must be called again, None if nothing waits."""
        return None

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:  # noqa: ARG002
        """Which of these processes on GPUs are the backend's own. `started`: the host's pid -> start time in clock ticks since boot. It
        reads /proc: call it on a thread."""
        return ()

    async def close(self) -> None:
        """The agent ends; containers and their limits stay."""


#: Called for a container that starts without limits, with the message for its pod's event.
ReportUnlimited = Callable[[GpuShare, str], None]


class Unlimited(Backend):
    """Sets no limits, and reports that. The operator chose this backend, or the node can use no other."""

    name: BackendName = "none"
    limits: Mapping[Resource, Strength] = {}

    def __init__(self, report: ReportUnlimited) -> None:
        self._report = report

    async def start(self, tenant: GpuShare) -> None:
        self._report(tenant, unlimited_message(tenant, "enforcement backend none"))


def not_enforced(tenant: GpuShare, pod_uid: str | None, message: str) -> HistoryEntry:
    """The entry about a container that runs without limits."""
    return HistoryEntry(
        what="event",
        id=tenant.allocation,
        pod=tenant.pod,
        pod_uid=pod_uid,
        container=tenant.container,
        gpus=tuple(gpu.name for gpu in tenant.gpus),
        why=message,
        code=NOT_ENFORCED,
    )


def unlimited_message(tenant: GpuShare, why: str) -> str:
    """The sentence for the event of the container's pod."""
    cores, mebibytes = sum(gpu.cores for gpu in tenant.gpus), sum(gpu.memory_bytes for gpu in tenant.gpus) >> 20
    return (
        f"nothing on this node keeps container {tenant.container or '?'} within its {cores} cores and {mebibytes} MiB of GPU memory "
        f"({why}); `gpumgr doctor` on the node says what could"
    )


#: A container can change many values; a message names at most this number.
_NAMED: Final = 3


def finding(tenant: GpuShare, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def listed(found: Sequence[str]) -> str:
    """The first few texts, and how many more there are."""
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
