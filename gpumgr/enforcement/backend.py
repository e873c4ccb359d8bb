"""The interface of an enforcement mechanism; the backend "none", which limits nothing; and the choice of the mechanisms of a node. A new
mechanism needs a module, its settings, and a line where the backends are constructed.

Calls for one container: `prepare` at Allocate; `start` before every start of the container; `observe` and `adjust` after each sample of the
GPUs' use while the container runs; `cleanup` when the allocation is gone and the container has no process. The agent may end and start
again at any point: what must survive is on disk or in separate processes, and `recover` takes it over.

The mechanisms of a share are the node's choice and the operator's overrides. Nothing that a pod's owner can write counts. `auto` uses the
driver's own memory limits where the node has them, and gpumgr's limiter for everything else. The other mechanisms are used where the
operator names them.
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

#: "mps-open": see `UnlimitedMps`; only gpumgr itself chooses it.
BackendName = Literal[schema.BackendName, "mps-open"]


class Backend:
    """One mechanism. A subclass overrides the methods that it needs. Callers use `unavailable` and `start`, which call `check_node` and
    `put_limits` and turn errors into texts and refusals. No method blocks the event loop for longer than reading or writing a small file
    takes. Coroutines run concurrently for different containers, but never `start` and `cleanup` of one container. `limits`: what the
    mechanism limits on this node, and how strongly; each call of `unavailable` may change it. `adjustable`: `observe` or `adjust` can
    change the limits of a running container. `running_keep_limits`: programs that run keep their limits, and new ones get the changed
    limits."""

    name: BackendName
    limits: Mapping[Resource, Strength]
    adjustable: bool = False
    running_keep_limits: bool = False

    async def unavailable(self) -> str | None:
        """Why this node can't use the mechanism, and what to do; None if the node can use it."""
        try:
            await self.check_node()
        except (GpumgrError, OSError) as error:
            return str(error)
        return None

    async def check_node(self) -> None:
        """Raises GpumgrError or OSError, with what to do, if this node can't use the mechanism."""

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:  # noqa: ARG002
        """The backend's part of the answer to Allocate for this resource. `tenant`: the container and its share. The answer for cores has
        everything that does not depend on the amount of memory. Each answer depends only on the tenant, the settings and the libraries.
        Raises Refusal."""
        return ContainerResponse()

    async def start(self, tenant: GpuShare) -> None:
        """Puts the container's limits in place, before each start of the container. Raises Refusal; the kubelet retries."""
        try:
            await self.put_limits(tenant)
        except Refusal:
            raise
        except (GpumgrError, OSError, ValueError) as error:
            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
            raise Refusal("internal", f"{tenant.describe()} can't start with the backend {self.name}: {text}") from error

    async def put_limits(self, tenant: GpuShare) -> None:
        """Puts the limits in place, see `start`. Raises GpumgrError, OSError, and ValueError for limits that the mechanism can't
        express."""

    async def vacate(self, uuids: Collection[str]) -> None:
        """Ends this backend's use of these GPUs before a container without this backend starts there. Raises Refusal."""

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:  # noqa: ARG002
        """Compares the limits of the running containers of this backend with what was granted, before `adjust` restores them. Returns
        findings for the pods' events."""
        return ()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:  # noqa: ARG002
        """Restores limits that differ from what was granted. Returns, for each container with a memory limit that could not be set, the
        reason; the former limit may be in force. A mechanism that is not `adjustable` returns no reasons."""
        return {}

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        """For containers that the last `adjust` returned: the highest memory limit of their programs, if it is known."""
        return {}

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        """How the containers of this backend used their turns, the times in which they may run kernels; empty without turns."""
        return {}

    def remains(self) -> Collection[AllocationId]:
        """Allocations that have files or other state of this backend. Raises OSError."""
        return ()

    async def cleanup(self, allocation: AllocationId) -> None:
        """Removes the state of an allocation that is gone and has no process. Raises GpumgrError, OSError."""

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        """Takes over the state of these containers after a start of the agent. All of them use this backend."""

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:  # noqa: ARG002
        """Ends daemons that no container needs. Called after each end of a container, and when the returned time has passed. `known`
        returns the allocations that exist at present. Returns the seconds until it must be called again, None if nothing waits."""
        return None

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:  # noqa: ARG002
        """Which of these processes on GPUs are the backend's own. `started`: the host's pid -> start time in clock ticks since boot. Reads
        /proc, so call it on a thread."""
        return ()

    async def close(self) -> None:
        """Called when the agent ends; containers and their limits stay."""


#: Called for a container that starts without limits, with the message for its pod's event.
ReportUnlimited = Callable[[GpuShare, str], None]


class Unlimited(Backend):
    """Sets no limits, and reports that. The operator chose this backend, or the node can use no other."""

    name: BackendName = "none"
    limits: Mapping[Resource, Strength] = {}

    def __init__(self, report: ReportUnlimited) -> None:
        self._report = report

    async def put_limits(self, tenant: GpuShare) -> None:
        self._report(tenant, unlimited_message(tenant, "enforcement backend none"))


def not_enforced(tenant: GpuShare, pod_uid: str | None, message: str) -> HistoryEntry:
    """The history's entry about a container that runs without limits."""
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
        f"({why}); `gpumgr doctor` on the node says which backends could"
    )


#: A container can change many values; a message names at most this number.
_NAMED: Final = 3


def finding(tenant: GpuShare, code: FindingCode, message: str) -> Finding:
    return Finding(allocation=tenant.allocation, code=code, message=message)


def listed(found: Sequence[str]) -> str:
    """The first few texts, and how many more there are."""
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


Mechanisms = tuple[str, ...]

NO_MECHANISM: Mechanisms = ("none",)


class MechanismChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The mechanisms of this node. `obstacles`: a mechanism's name -> why the node can't use the mechanism. `strengths`: the limits of all
    mechanisms."""

    mechanisms: Mechanisms = NO_MECHANISM
    obstacles: Mapping[str, str] = msgspec.field(default_factory=dict)
    strengths: Strengths = msgspec.field(default_factory=dict)

    @property
    def able(self) -> Strengths:
        """The mechanisms that the node can use, with their strengths."""
        return {name: limits for name, limits in self.strengths.items() if name not in self.obstacles}

    def limits(self, gpu: Gpu) -> GpuLimits:
        """The limits of new shares on the GPU, without the operator's overrides."""
        return gpu_limits(gpu, self.mechanisms, self.strengths, self.obstacles)

    def describe(self, gpus: Iterable[Gpu]) -> str:
        """The text for the log, the node's annotation and `gpumgr doctor`; without GPUs it names only the mechanisms."""
        return describe_limits((gpu.index, self.limits(gpu)) for gpu in gpus) or "+".join(self.mechanisms)


def choose_mechanisms(setting: str, obstacles: Mapping[str, str | None], strengths: Strengths) -> MechanismChoice:
    """`obstacles`: for each backend, why this node can't use it, or None if it can. A backend that the operator names is chosen even if the
    node can't use it: containers are refused with that reason instead of running without limits."""
    named = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    node = MechanismChoice(obstacles=named, strengths=strengths)
    return replace(node, mechanisms=expand(setting, node.able))


def expand(setting: str, able: Strengths) -> Mechanisms:
    """The mechanisms for one value of enforcement.backend; a mechanism for memory alone is first. `able`: the mechanisms that the node can
    use."""
    if setting not in ("auto", "nvml-memory"):
        return (setting,)
    memory = ["nvml-memory"] if setting == "nvml-memory" or able.get("nvml-memory") else []
    return (*memory, *(["limiter"] if "limiter" in able else [])) or NO_MECHANISM


def override_for(overrides: Sequence[str], pod: PodView | None) -> tuple[str, str] | None:
    """The override for this pod's service account, else for its namespace, as (subject, value of enforcement.backend); None if there is
    none."""
    rules = dict(rule.split("=", 1) for rule in overrides)
    for subject in (pod.account, pod.namespace) if pod is not None else ():
        if subject in rules:
            return subject, rules[subject]
    return None


def mechanisms_for(setting: str, able: Strengths, node: Mechanisms) -> Mechanisms:
    """The mechanisms of a share with an override. `node`: the node's mechanisms. On a node with MPS, programs get contexts only through the
    GPU's MPS daemon, so a container without limits gets "mps-open"."""
    mechanisms = expand(setting, able)
    return ("mps-open",) if mechanisms == NO_MECHANISM and "mps" in node else mechanisms
