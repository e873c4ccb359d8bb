"""The interface of an enforcement mechanism, the backend "none", and the choice of a node's mechanisms.

Calls for one container: `prepare` at Allocate; `start` before every start of the container; `observe` and `adjust` after each sample of the
GPUs' use; `cleanup` when the allocation is gone and no process is left. After a restart of the agent `recover` takes over what is on disk
or in separate processes.

Only the operator's settings choose the mechanisms of a share, nothing that a pod's owner can write. `auto` uses the driver's own memory
limits where the node has them, and gpumgr's limiter for everything else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpumgr.agent.ports import Finding, FindingCode, RunningContainer
from gpumgr.common.errors import GpumgrError, Refusal
from gpumgr.common.units import Resource
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.gpu_share import GpuLimits, GpuShare, Strength, Strengths, describe_limits, gpu_limits
from gpumgr.ledger.history import NOT_ENFORCED, HistoryEntry
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import AllocationOnGpu, TurnUse
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView
from gpumgr.settings import schema

#: "mps-open": a container without limits on a node with MPS. Only gpumgr itself chooses this backend.
BackendName = Literal[schema.BackendName, "mps-open"]


class Backend:
    """One mechanism. Callers use `unavailable` and `start`; subclasses override `check_node` and `put_limits`.

    No method blocks the event loop for longer than reading or writing a small file. Coroutines run concurrently for different containers,
    but never `start` and `cleanup` of one container. `limits`: what the mechanism limits on this node, and how strongly, as of the last
    `unavailable`. `adjustable`: it can change the limits of a running container. `running_keep_limits`: only new programs get changed
    limits.
    """

    name: BackendName
    limits: Mapping[Resource, Strength]
    adjustable: bool = False
    running_keep_limits: bool = False

    async def unavailable(self) -> str | None:
        """Why this node can't use the mechanism, and what to do; None: it can."""
        try:
            await self.check_node()
        except (GpumgrError, OSError) as error:
            return str(error)
        return None

    async def check_node(self) -> None:
        """Raises GpumgrError or OSError, with what to do, if the node can't use the mechanism."""

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:  # noqa: ARG002
        """The backend's part of the answer to Allocate for this resource. Raises Refusal.

        The answer for cores has everything that does not depend on the amount of memory. Each answer depends only on the share, the
        settings and the libraries.
        """
        return ContainerResponse()

    async def start(self, tenant: GpuShare) -> None:
        """Puts the limits in place before each start of the container. Raises Refusal; the kubelet retries."""
        try:
            await self.put_limits(tenant)
        except Refusal:
            raise
        except (GpumgrError, OSError, ValueError) as error:
            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
            raise Refusal("internal", f"{tenant.describe()} can't start with the backend {self.name}: {text}") from error

    async def put_limits(self, tenant: GpuShare) -> None:
        """Raises GpumgrError, OSError, and ValueError for limits that the mechanism can't express."""

    async def vacate(self, uuids: Collection[str]) -> None:
        """Frees these GPUs from this backend before a container of another backend starts there. Raises Refusal."""

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:  # noqa: ARG002
        """Compares the limits of the running containers with what was granted, before `adjust` restores them."""
        return ()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:  # noqa: ARG002
        """Restores limits that differ from what was granted.

        Returns the reason for each container with a memory limit that could not be set; the former limit may be in force.
        """
        return {}

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        """Container that the last `adjust` returned -> the highest memory limit of its programs, if known."""
        return {}

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        """How containers used their turns, the times in which they may run kernels."""
        return {}

    def remains(self) -> Collection[AllocationId]:
        """Allocations with files or other state of this backend. Raises OSError."""
        return ()

    async def cleanup(self, allocation: AllocationId) -> None:
        """Removes the state of an allocation that is gone and has no process. Raises GpumgrError, OSError."""

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        """Takes over the state of this backend's containers after a start of the agent."""

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:  # noqa: ARG002
        """Ends daemons that no container needs. `known` returns the allocations that exist now.

        Called after each end of a container, and when the returned seconds have passed (None: nothing waits).
        """
        return None

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:  # noqa: ARG002
        """Which processes on GPUs are the backend's own. `started`: host pid -> start time in clock ticks since boot. Blocks."""
        return ()

    async def close(self) -> None:
        """Called when the agent ends. Containers and their limits stay."""


#: Called with the message for the pod's event when a container starts without limits.
ReportUnlimited = Callable[[GpuShare, str], None]


class Unlimited(Backend):
    """Sets no limits, and reports each start of a container as unlimited."""

    name: BackendName = "none"
    limits: Mapping[Resource, Strength] = {}

    def __init__(self, report: ReportUnlimited) -> None:
        self._report = report

    async def put_limits(self, tenant: GpuShare) -> None:
        self._report(tenant, unlimited_message(tenant, "enforcement backend none"))


def not_enforced(tenant: GpuShare, pod_uid: str | None, message: str) -> HistoryEntry:
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
    cores, mebibytes = sum(gpu.cores for gpu in tenant.gpus), sum(gpu.memory_bytes for gpu in tenant.gpus) >> 20
    return (
        f"nothing on this node keeps container {tenant.container or '?'} within its {cores} cores and {mebibytes} MiB of GPU memory "
        f"({why}); `gpumgr doctor` on the node says which backends could"
    )


#: A message names at most this many of the values that a container changed.
_NAMED: Final = 3


def finding(tenant: GpuShare, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def listed(found: Sequence[str]) -> str:
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


Mechanisms = tuple[str, ...]

NO_MECHANISM: Mechanisms = ("none",)


class MechanismChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The mechanisms of new shares on this node. `obstacles`: mechanism -> why the node can't use it."""

    mechanisms: Mechanisms = NO_MECHANISM
    obstacles: Mapping[str, str] = msgspec.field(default_factory=dict)
    strengths: Strengths = msgspec.field(default_factory=dict)

    @property
    def able(self) -> Strengths:
        return {name: limits for name, limits in self.strengths.items() if name not in self.obstacles}

    def limits(self, gpu: Gpu) -> GpuLimits:
        return gpu_limits(gpu, self.mechanisms, self.strengths, self.obstacles)

    def describe(self, gpus: Iterable[Gpu]) -> str:
        """The text for log, annotation and `gpumgr doctor`; without GPUs only the mechanisms' names."""
        return describe_limits((gpu.index, self.limits(gpu)) for gpu in gpus) or "+".join(self.mechanisms)


def choose_mechanisms(setting: str, obstacles: Mapping[str, str | None], strengths: Strengths) -> MechanismChoice:
    """Chooses the mechanisms for enforcement.backend. `obstacles`: backend -> why this node can't use it, None if it can.

    A backend that the operator names is chosen even with an obstacle: containers are refused instead of running without limits.
    """
    named = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    node = MechanismChoice(obstacles=named, strengths=strengths)
    return replace(node, mechanisms=expand(setting, node.able))


def expand(setting: str, able: Strengths) -> Mechanisms:
    """The mechanisms for one value of enforcement.backend. `auto` and `nvml-memory` may have two: nvml-memory, which limits only memory,
    and then the limiter."""
    if setting not in ("auto", "nvml-memory"):
        return (setting,)
    memory = ["nvml-memory"] if setting == "nvml-memory" or able.get("nvml-memory") else []
    return (*memory, *(["limiter"] if "limiter" in able else [])) or NO_MECHANISM


def override_for(overrides: Sequence[str], pod: PodView | None) -> tuple[str, str] | None:
    """(subject, value of enforcement.backend) of the override for the pod's service account, else for its namespace."""
    rules = dict(rule.split("=", 1) for rule in overrides)
    for subject in (pod.account, pod.namespace) if pod is not None else ():
        if subject in rules:
            return subject, rules[subject]
    return None


def mechanisms_for(setting: str, able: Strengths, node: Mechanisms) -> Mechanisms:
    """The mechanisms of a share with an override. `node`: the node's mechanisms."""
    # With MPS, programs get contexts only through the GPU's daemon; "mps-open" gives a container without limits access to the daemon.
    mechanisms = expand(setting, able)
    return ("mps-open",) if mechanisms == NO_MECHANISM and "mps" in node else mechanisms
