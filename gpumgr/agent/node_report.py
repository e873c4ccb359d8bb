"""What all readers are shown: one frozen instant of the agent, taken on the event loop, read on any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpumgr.agent.cordons import Cordon
from gpumgr.agent.writer import AgentView
from gpumgr.topology.devices import NodeSample
from gpumgr.units import GpuName
from gpumgr.usage.node_use import GrantedGpu, NodeUse

#: The only values of the label `reason`: the driver's text never becomes a label.
REASONS: Final = frozenset(
    {"xid", "ecc", "lost", "reset", "error", "nvml_down", "mig", "operator", "missing", "quarantine", "other"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxState:
    """What waits to be written to the API server. `oldest_seconds`: for how long the oldest thing that is due has waited (0.0: none is).

    `dropped` and `written` (by what: "pod", "event", "node", "eviction"; and how: "ok", "refused") count since the start of the process.
    `away`: the API server does not answer. `eviction_retries` counts eviction requests after the first for a pod.
    """

    waiting: int = 0
    oldest_seconds: float = 0.0
    dropped: int = 0
    written: Mapping[tuple[str, str], int] = field(default_factory=dict)
    away: bool = False
    eviction_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """`node` is the Kubernetes node's name, `at` the instant in unix seconds. `sample` is NVML's latest (None: there was none yet),
    `sampled_at` its moment in monotonic seconds.

    `nvml_errors` counts calls that went wrong by function and NVML error number, `streams` the kubelet's open ListAndWatch calls by
    resource.

    `reasons` says by UUID, in one of the words of REASONS, why a GPU takes nothing new. It matters only for GPUs of which the view
    says so, and may be incomplete.

    `use` says who uses what (None: nobody looked yet), `over` which containers are over their memory, and where. `enforcement` has each
    mechanism that new shares get, with what it keeps in words ("cores", "memory", "cores and memory"). `vcuda_registrations` (by
    result) and `mps_daemon_restarts` (by UUID) count since the start of the process. What keeps each container, its allocation says.

    `registered` tells of each resource whether the kubelet has it from us, `not_ready` in sentences why the node can't take pods with
    GPUs now. `cordons` (by UUID) are what operators took out of service. `outbox` None: there is no API server. `connections` are those
    that the web server has open, `connections_refused` those that it did not take for want of room since the start of the process.
    """

    view: AgentView
    node: str = ""
    at: float = 0.0
    registered: Mapping[str, bool] = field(default_factory=dict)
    not_ready: tuple[str, ...] = ()
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    outbox: OutboxState | None = None
    connections: int = 0
    connections_refused: int = 0
    sample: NodeSample | None = None
    sampled_at: float | None = None
    nvml_up: bool = False
    nvml_errors: Mapping[tuple[str, int], int] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    use: NodeUse | None = None
    over: frozenset[GrantedGpu] = frozenset()
    enforcement: tuple[tuple[str, str], ...] = ()
    vcuda_registrations: Mapping[str, int] = field(default_factory=dict)
    mps_daemon_restarts: Mapping[str, int] = field(default_factory=dict)

    def unschedulable(self) -> Mapping[GpuName, str]:
        """GPU -> word of REASONS, of those that take nothing new."""
        return {gpu: self._reason(gpu) for gpu in self.view.node.unschedulable}

    def _reason(self, gpu: GpuName) -> str:
        card = self.view.ledger.gpu_registry.by_name.get(gpu)
        word = self.reasons.get(card.uuid) if card else None
        if word is not None:
            return word if word in REASONS else "other"
        if gpu not in self.view.node.rows:
            return "missing"
        return "quarantine" if gpu in self.view.inventory.quarantine.held else "other"
