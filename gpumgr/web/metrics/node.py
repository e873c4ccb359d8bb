"""Metrics of the GPUs, and of the agent and its connections. Pure functions of a report. A value that the driver does not report has no
series.

The label `gpu` is the GPU's UUID everywhere. Ratios are 0..1, memory is in bytes (Prometheus: base units only).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.prometheus_text import Family, RenderedFamily, counter, gauge, render_all
from gpumgr.common.units import CORES_PER_GPU, ratio
from gpumgr.ledger.ledger import Ledger, current_shares, granted_mebibytes
from gpumgr.ledger.node_use import UnattributedSum
from gpumgr.placement.devices import GpuSample

#: Values of a family's labels, in the order of the labels.
Values = tuple[str, ...]
Series = Mapping[Values, float]

_INFO: Final = gauge(
    "gpu_info", "Description of the GPU; always 1.", "node", "gpu", "index", "minor", "model", "pci_bus_id", "numa", "driver"
)
_LIMITS: Final = gauge(
    "gpu_enforcement_info",
    "Strength of the limits of new shares (hard, soft, none), and the mechanism; always 1.",
    *("gpu", "memory", "memory_by", "cores", "cores_by"),
)
_TOTAL: Final = gauge("gpu_memory_total_bytes", "Memory of the GPU.", "gpu")
_HEALTHY: Final = gauge("gpu_healthy", "1 if new containers may be placed on the GPU.", "gpu")
_REASON: Final = gauge("gpu_unhealthy_reason", "1 for the reason why the GPU takes no new containers.", "gpu", "reason")
_NOT_READABLE: Final = gauge(
    "gpus_not_readable", "GPUs that the driver lists but can't describe, unless their UUID is registered."
)
_NOT_LISTED: Final = gauge("gpus_not_listed", "GPUs on the PCI bus that the driver does not list.")
_CORDONED: Final = gauge("gpu_cordoned", "1 if an operator took the GPU out of service.", "gpu")
_LINKS: Final = gauge(
    "nvlink_active_links",
    "Active NVLinks between two GPUs; with NVSwitch, the smaller of the two GPUs' link counts.",
    *("gpu", "peer"),
)
_CORES: Final = gauge("gpu_core_allocated_ratio", "Share of the GPU's cores that containers hold.", "gpu")
_MEMORY: Final = gauge("gpu_memory_allocated_bytes", "Memory that containers hold; for a whole GPU all its memory.", "gpu")
_SHARERS: Final = gauge("gpu_shared_containers", "Containers that share the GPU; 0 for a whole GPU.", "gpu")


_SAMPLED: Final[tuple[tuple[Family, Callable[[GpuSample], float | None]], ...]] = (
    (
        gauge(
            "gpu_memory_used_bytes",
            "Memory in use on the GPU (with an old driver, including what it reserves for itself).",
            "gpu",
        ),
        lambda sample: sample.memory_used_bytes,
    ),
    (
        gauge("gpu_memory_reserved_bytes", "Memory that the driver reserves for itself.", "gpu"),
        lambda sample: sample.memory_reserved_bytes,
    ),
    (
        gauge("gpu_utilization_ratio", "Share of the driver's sample period in which a kernel ran on the GPU.", "gpu"),
        lambda sample: ratio(sample.utilization_ratio),
    ),
    (
        gauge("gpu_memory_copy_ratio", "Share of the driver's sample period in which memory was read or written.", "gpu"),
        lambda sample: ratio(sample.memory_copy_ratio),
    ),
    (gauge("gpu_temperature_celsius", "Temperature of the GPU's die.", "gpu"), lambda sample: sample.temperature_celsius),
    (gauge("gpu_power_watts", "Power that the board draws.", "gpu"), lambda sample: sample.power_watts),
)
_UNACCOUNTED: Final[tuple[tuple[Family, Callable[[UnattributedSum], float | None]], ...]] = (
    (
        gauge("unaccounted_memory_bytes", "GPU memory of processes without an allocation.", "gpu"),
        lambda use: use.memory_bytes,
    ),
    (
        gauge("unaccounted_processes", "Processes without an allocation on the GPU.", "gpu"),
        lambda use: use.processes,
    ),
)

_OF_GPUS: Final = (
    *(_INFO, _LIMITS, _TOTAL, _HEALTHY, _REASON, _NOT_READABLE, _NOT_LISTED, _CORDONED, _LINKS, _CORES, _MEMORY, _SHARERS),
    *(family for family, _ in _SAMPLED),
    *(family for family, _ in _UNACCOUNTED),
)


def render_gpus(report: NodeReport, *, node: str) -> Iterator[RenderedFamily]:
    """Yields all families, also without series. `node` is the Kubernetes node's name."""
    yield from render_all(_hardware(report, node))
    for family, read in _SAMPLED:
        yield from render_all({family: _by({uuid: read(gpu) for uuid, gpu in report.current_samples.items()})})
    yield from render_all(_healthy(report))
    yield from render_all(_allocated(report.view.ledger))
    registered = report.view.ledger.gpu_registry.by_name
    for unaccounted, count in _UNACCOUNTED:
        values = {registered[gpu].uuid: count(use) for gpu, use in report.current_use.gpus.items() if gpu in registered}
        yield from render_all({unaccounted: _by(values)})


def _by(values: Mapping[str, float | None]) -> Series:
    """One series for each key. The key is the value of the only label."""
    return {(key,): value for key, value in values.items() if value is not None}


def _hardware(report: NodeReport, node: str) -> Mapping[Family, Series]:
    gpu_registry, snapshot = report.view.ledger.gpu_registry, report.view.inventory.snapshot
    shown = report.view.inventory.gpus(gpu_registry)
    infos: dict[Values, float] = {}
    for registered in gpu_registry.gpus:
        gpu = shown.get(registered.name)
        facts = (gpu.index, gpu.minor, gpu.model, gpu.bus_id, gpu.numa_node, snapshot.driver_version) if gpu else (None,) * 6
        infos[node, registered.uuid, *("" if fact is None else str(fact) for fact in facts)] = 1
    links: dict[Values, float] = {
        (gpu.uuid, peer.uuid): links
        for gpu, row in zip(snapshot.gpus, snapshot.topology.nvlinks, strict=True)
        for peer, links in zip(snapshot.gpus, row, strict=True)
        if links and peer is not gpu
    }
    return {
        _INFO: infos,
        _TOTAL: _by({gpu.uuid: gpu.memory_bytes for gpu in shown.values()}),
        _LIMITS: {(uuid, each.memory, each.memory_by, each.cores, each.cores_by): 1 for uuid, each in report.gpu_limits.items()},
        _LINKS: links,
    }


def _healthy(report: NodeReport) -> Mapping[Family, Series]:
    gpus, unschedulable = report.view.ledger.gpu_registry.gpus, report.unschedulable()
    series: dict[Family, Series] = {
        _HEALTHY: {(gpu.uuid,): gpu.name not in unschedulable for gpu in gpus},
        _REASON: {(gpu.uuid, unschedulable[gpu.name]): 1 for gpu in gpus if gpu.name in unschedulable},
        _CORDONED: {(gpu.uuid,): gpu.uuid in report.cordons for gpu in gpus},
    }
    if report.nvml_up:
        inventory = report.view.inventory
        series[_NOT_READABLE] = {(): len(inventory.unnamed(report.view.ledger.gpu_registry))}
        series[_NOT_LISTED] = {(): inventory.snapshot.unlisted}
    return series


def _allocated(ledger: Ledger) -> Mapping[Family, Series]:
    gpus, memory = ledger.gpu_registry.gpus, granted_mebibytes(ledger)
    sharers = Counter(gpu for allocation in current_shares(ledger) for gpu in allocation.places)
    return {
        _CORES: {(gpu.uuid,): ledger.used(gpu.name).cores / CORES_PER_GPU for gpu in gpus},
        _MEMORY: {(gpu.uuid,): memory[gpu.name] << 20 for gpu in gpus if gpu.memory_mebibytes},
        _SHARERS: {(gpu.uuid,): sharers[gpu.name] for gpu in gpus},
    }


#: All other values are counted as "other".
WRITES: Final = ("pod", "event", "node", "eviction")
OUTCOMES: Final = ("ok", "refused")


def _writes(queue: ApiQueueState) -> Series:
    """All series exist from the start, so that a first refusal shows as an increase."""
    writes: dict[Values, float] = dict.fromkeys(((what, outcome) for what in WRITES for outcome in OUTCOMES), 0)
    for (what, outcome), times in queue.written.items():
        key = (what if what in WRITES else "other", outcome if outcome in OUTCOMES else "other")
        writes[key] = writes.get(key, 0) + times
    return writes


def _unenforced(report: NodeReport) -> Series:
    shares = current_shares(report.view.ledger)
    return {(): sum(not share.anonymous and not _enforced(share.mechanisms) for share in shares)}


_UP: Final = gauge("nvml_up", "1 while the driver's library answers.")
_READY: Final = gauge("agent_ready", "1 while the node can take pods with GPUs.")
_TAKEN: Final = gauge("nvml_last_sample_timestamp_seconds", "When the GPUs were last sampled, in unix time.")
_AGENT: Final[Mapping[Family, Callable[[NodeReport], Series]]] = {
    _UP: lambda report: {(): report.nvml_up},
    _READY: lambda report: {(): not report.not_ready},
    counter("nvml_call_errors_total", "Failed calls of the driver's library.", "function", "code"): lambda report: {
        (call, str(code)): number for (call, code), number in report.nvml_errors.items()
    },
    gauge("listandwatch_streams", "Open ListAndWatch calls of the kubelet.", "resource"): lambda report: _by(report.streams),
    gauge("http_connections", "Connections that the web server has open."): lambda report: {(): report.connections},
    counter("http_connections_refused_total", "Connections that the web server refused at its limit."): lambda report: {
        (): report.connections_refused
    },
    counter("http_disconnects_total", "Requests that the client ended before they were answered."): lambda report: {
        (): report.disconnects
    },
    gauge("containers_without_enforcement", "Containers that share a GPU without enforced limits."): _unenforced,
    counter("vcuda_registrations_total", "Registrations of processes with the backend vcuda.", "result"): lambda report: _by(
        report.vcuda_registrations
    ),
    counter("mps_daemon_restarts_total", "Crashed MPS daemons that were started again.", "gpu"): lambda report: _by(
        report.mps_daemon_restarts
    ),
}
_QUEUE: Final[Mapping[Family, Callable[[ApiQueueState], Series]]] = {
    gauge("api_server_up", "1 while the API server answers."): lambda queue: {(): not queue.away},
    gauge("api_queue_waiting", "Objects to be written to the API server."): lambda queue: {(): queue.waiting},
    gauge(
        "api_queue_oldest_seconds", "How long the oldest object has waited to be written to the API server; 0 without any."
    ): lambda queue: {(): max(0.0, queue.oldest_seconds)},
    counter(
        "api_queue_dropped_total", "Events that were dropped: too many waited, or too many were about one object."
    ): lambda queue: {(): queue.dropped},
    counter("api_writes_total", "Writes to the API server, by object and outcome.", "what", "outcome"): _writes,
    counter(
        "eviction_retries_total", "Eviction requests after the first for a pod, for example because of its PodDisruptionBudget."
    ): lambda queue: {(): queue.eviction_retries},
    gauge("api_objects_unreadable", "Pods that can't be read; their last readable state is used."): lambda queue: {
        (): queue.unreadable
    },
}
FAMILIES: Final = (*_OF_GPUS, _TAKEN, *_AGENT, *_QUEUE)


def render_agent(report: NodeReport | None, *, sampled_at: float | None) -> Iterator[RenderedFamily]:
    """`report` is None before the first report. `sampled_at`: unix time of its sample, if it has one."""
    if report is None:
        yield from render_all({_UP: {(): False}, _READY: {(): False}})
        return
    yield from render_all({family: read(report) for family, read in _AGENT.items()})
    if sampled_at is not None:
        yield from render_all({_TAKEN: {(): round(sampled_at, 3)}})
    if report.api_queue is not None:
        queue = report.api_queue
        yield from render_all({family: read(queue) for family, read in _QUEUE.items()})


def _enforced(mechanisms: tuple[str, ...]) -> bool:
    return any(name not in ("none", "mps-open") for name in mechanisms)
