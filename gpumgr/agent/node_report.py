"""The state of the agent at one instant, for all readers: made on the event loop, read on any thread."""

from collections.abc import Mapping

import msgspec

from gpumgr.agent.api import Cordon
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.node_use import AllocationOnGpu, NodeUse
from gpumgr.placement.devices import GpuSample, NodeSample


class ApiQueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of writes to the API server. `oldest_seconds`: how long the oldest due write has waited (0.0: none is due). `away`: the API
    server does not answer. `unreadable`: how many pods of the watch can't be read.

    Since the start of the process: `dropped` counts writes, `written` by object ("pod", "event", "node", "eviction") and result ("ok",
    "refused"), `eviction_retries` requests after the first for a pod.
    """

    waiting: int = 0
    oldest_seconds: float = 0.0
    dropped: int = 0
    written: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    away: bool = False
    eviction_retries: int = 0
    unreadable: int = 0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`node` is the Kubernetes node's name, `mode` the setting node.mode, `at` in unix seconds. `sample` is NVML's latest, `sampled_at` in
    monotonic seconds; these and `use` are None before the first sample.

    `reasons`: UUID -> why a GPU accepts no new containers, a word of gpumgr.driver.health.Reason. Ignore it for a GPU that is not
    unschedulable in `view`. Some GPUs may be missing. `over`: the containers over their memory limit. `gpu_limits`: UUID -> how new shares
    are limited on a listed GPU.

    `registered`: resource (mode dra: the driver) -> whether this agent has registered it with the kubelet. `not_ready` says why the node
    can't accept pods with GPUs now, `warnings` what else is wrong with its offer. `cordons` are by UUID. `api_queue` None: there is no API
    server.

    `connections` counts the web server's open connections, `streams` the kubelet's open ListAndWatch calls by resource. Other counts are
    since the start of the process: `nvml_errors` by function and NVML error number, `vcuda_registrations` by result, `mps_daemon_restarts`
    by UUID, `connections_refused` over the server's limit, `disconnects` before the response was complete.
    """

    view: AgentView
    node: str = ""
    mode: str = "plugin"
    at: float = 0.0
    registered: Mapping[str, bool] = msgspec.field(default_factory=dict)
    not_ready: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cordons: Mapping[str, Cordon] = msgspec.field(default_factory=dict)
    api_queue: ApiQueueState | None = None
    connections: int = 0
    connections_refused: int = 0
    disconnects: int = 0
    sample: NodeSample | None = None
    sampled_at: float | None = None
    nvml_up: bool = False
    nvml_errors: Mapping[tuple[str, int], int] = msgspec.field(default_factory=dict)
    streams: Mapping[str, int] = msgspec.field(default_factory=dict)
    reasons: Mapping[str, str] = msgspec.field(default_factory=dict)
    use: NodeUse | None = None
    over: frozenset[AllocationOnGpu] = frozenset()
    gpu_limits: Mapping[str, GpuLimits] = msgspec.field(default_factory=dict)
    vcuda_registrations: Mapping[str, int] = msgspec.field(default_factory=dict)
    mps_daemon_restarts: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def current_use(self) -> NodeUse:
        """Empty while the driver does not answer, since old values would look current."""
        return self.use if self.use is not None and self.nvml_up else NodeUse()

    @property
    def current_samples(self) -> Mapping[str, GpuSample]:
        """UUID -> sample; empty while the driver does not answer."""
        return self.sample.gpus if self.sample is not None and self.nvml_up else {}

    def unschedulable(self) -> Mapping[GpuName, str]:
        """GPU that accepts no new containers -> a word of `reasons`, or missing, quarantine or other."""
        return {gpu: self._reason(gpu) for gpu in self.view.node.out_of_service}

    def _reason(self, gpu: GpuName) -> str:
        registered = self.view.ledger.gpu_registry.by_name.get(gpu)
        word = self.reasons.get(registered.uuid) if registered else None
        if word is not None:
            return word
        if gpu not in self.view.node.rows:
            return "missing"
        return "quarantine" if gpu in self.view.inventory.quarantine.held else "other"
