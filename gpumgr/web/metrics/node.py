"""Metrics of the GPUs, and of the agent and its connections. Pure functions of a report. A value that the driver does not report has no
series.

The label `gpu` is the GPU's UUID everywhere. Ratios are 0..1, memory is in bytes (Prometheus: base units only).
"""

from collections.abc import Callable, Iterator
from typing import Final

from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.prometheus_text import Family, RenderedFamily, counter, gauge, label_text, render
from gpumgr.common.units import CORES_PER_GPU, GpuName, ratio
from gpumgr.ledger.ledger import Ledger, current_shares, granted_mebibytes
from gpumgr.ledger.node_use import UnattributedSum
from gpumgr.placement.devices import GpuSample, NodeSample

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
    "Active NVLinks between two GPUs; with NVSwitch the smaller of their numbers of links to the switches.",
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
        gauge("unaccounted_memory_bytes", "Memory on the GPU of processes without an allocation.", "gpu"),
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
    yield from _hardware(report, node)
    # While the driver does not answer, old values would look current.
    sample = report.sample if report.sample and report.nvml_up else NodeSample()
    for family, read in _SAMPLED:
        yield render(family, {_gpu(uuid): value for uuid, gpu in sample.gpus.items() if (value := read(gpu)) is not None})
    yield from _healthy(report)
    yield _links(report)
    yield from _allocated(report.view.ledger)
    uses, registered = report.use.gpus if report.use and report.nvml_up else {}, report.view.ledger.gpu_registry.by_name
    for unaccounted, count in _UNACCOUNTED:
        values = {_gpu(registered[gpu].uuid): count(use) for gpu, use in uses.items() if gpu in registered}
        yield render(unaccounted, {labels: value for labels, value in values.items() if value is not None})


def _gpu(uuid: str) -> str:
    return label_text(("gpu",), (uuid,))


def _hardware(report: NodeReport, node: str) -> Iterator[RenderedFamily]:
    gpu_registry, snapshot = report.view.ledger.gpu_registry, report.view.inventory.snapshot
    shown = report.view.inventory.gpus(gpu_registry)
    infos: dict[str, float] = {}
    for registered in gpu_registry.gpus:
        gpu = shown.get(registered.name)
        facts = (gpu.index, gpu.minor, gpu.model, gpu.bus_id, gpu.numa_node, snapshot.driver_version) if gpu else (None,) * 6
        infos[label_text(_INFO.labels, (node, registered.uuid, *("" if fact is None else str(fact) for fact in facts)))] = 1
    yield render(_INFO, infos)
    yield render(_TOTAL, {_gpu(gpu.uuid): gpu.memory_bytes for gpu in shown.values() if gpu.memory_bytes is not None})
    limits = ((uuid, each.memory, each.memory_by, each.cores, each.cores_by) for uuid, each in report.gpu_limits.items())
    yield render(_LIMITS, {label_text(_LIMITS.labels, each): 1 for each in limits})


def _healthy(report: NodeReport) -> Iterator[RenderedFamily]:
    gpu_registry, unschedulable = report.view.ledger.gpu_registry.gpus, report.unschedulable()
    yield render(_HEALTHY, {_gpu(registered.uuid): registered.name not in unschedulable for registered in gpu_registry})
    yield render(
        _REASON, {label_text(_REASON.labels, (c.uuid, unschedulable[c.name])): 1 for c in gpu_registry if c.name in unschedulable}
    )
    if report.nvml_up:
        yield render(_NOT_READABLE, {"": len(report.view.inventory.unnamed(report.view.ledger.gpu_registry))})
        yield render(_NOT_LISTED, {"": report.view.inventory.snapshot.unlisted})
    yield render(_CORDONED, {_gpu(registered.uuid): registered.uuid in report.cordons for registered in gpu_registry})


def _links(report: NodeReport) -> RenderedFamily:
    snapshot = report.view.inventory.snapshot
    return render(
        _LINKS,
        {
            label_text(_LINKS.labels, (gpu.uuid, peer.uuid)): links
            for gpu, row in zip(snapshot.gpus, snapshot.topology.nvlinks, strict=True)
            for peer, links in zip(snapshot.gpus, row, strict=True)
            if links and peer is not gpu
        },
    )


def _allocated(ledger: Ledger) -> Iterator[RenderedFamily]:
    gpu_registry, sharers, memory = ledger.gpu_registry.gpus, _sharers(ledger), granted_mebibytes(ledger)
    yield render(
        _CORES, {_gpu(registered.uuid): ledger.used(registered.name).cores / CORES_PER_GPU for registered in gpu_registry}
    )
    yield render(
        _MEMORY,
        {_gpu(registered.uuid): memory[registered.name] << 20 for registered in gpu_registry if registered.memory_mebibytes},
    )
    yield render(_SHARERS, {_gpu(registered.uuid): sharers.get(registered.name, 0) for registered in gpu_registry})


def _sharers(ledger: Ledger) -> dict[GpuName, int]:
    count: dict[GpuName, int] = {}
    for allocation in current_shares(ledger):
        for gpu in allocation.places:
            count[gpu] = count.get(gpu, 0) + 1
    return count


_UP: Final = gauge("nvml_up", "1 while the driver's library answers.")
_READY: Final = gauge("agent_ready", "1 while the node can take pods with GPUs.")
_TAKEN: Final = gauge("nvml_last_sample_timestamp_seconds", "When the GPUs were last sampled, in unix time.")
_ERRORS: Final = counter("nvml_call_errors_total", "Failed calls of the driver's library.", "function", "code")
_STREAMS: Final = gauge("listandwatch_streams", "Open ListAndWatch calls of the kubelet.", "resource")
_CONNECTIONS: Final = gauge("http_connections", "Connections that the web server has open.")
_REFUSED: Final = counter("http_connections_refused_total", "Connections that the web server refused at its limit.")
_DISCONNECTS: Final = counter("http_disconnects_total", "Requests that the client ended before they were answered.")
_SERVER_UP: Final = gauge("api_server_up", "1 while the API server answers.")
_WAITING: Final = gauge("api_queue_waiting", "Objects to be written to the API server.")
_OLDEST: Final = gauge(
    "api_queue_oldest_seconds", "How long the oldest object has waited to be written to the API server; 0 without any."
)
_DROPPED: Final = counter(
    "api_queue_dropped_total", "Events that were dropped: too many waited, or too many were about one object."
)
_WRITES: Final = counter("api_writes_total", "Writes to the API server, by object and outcome.", "what", "outcome")
_RETRIES: Final = counter(
    "eviction_retries_total", "Eviction requests after the first for a pod, for example because of its PodDisruptionBudget."
)
_UNREADABLE: Final = gauge("api_objects_unreadable", "Pods that can't be read; their last readable state is used.")
_UNENFORCED: Final = gauge("containers_without_enforcement", "Containers that share a GPU without enforced limits.")
_REGISTRATIONS: Final = counter("vcuda_registrations_total", "Registrations of processes with the backend vcuda.", "result")
_RESTARTS: Final = counter("mps_daemon_restarts_total", "Crashed MPS daemons that were started again.", "gpu")

FAMILIES: Final = (
    *_OF_GPUS,
    *(_UP, _READY, _TAKEN, _ERRORS, _STREAMS, _CONNECTIONS, _REFUSED, _DISCONNECTS),
    *(_SERVER_UP, _WAITING, _OLDEST, _DROPPED, _WRITES, _RETRIES, _UNREADABLE),
    *(_UNENFORCED, _REGISTRATIONS, _RESTARTS),
)

#: All other values are counted as "other".
WRITES: Final = ("pod", "event", "node", "eviction")
OUTCOMES: Final = ("ok", "refused")


def render_agent(report: NodeReport | None, *, sampled_at: float | None) -> Iterator[RenderedFamily]:
    """`report` is None before the first report. `sampled_at`: unix time of its sample, if it has one."""
    yield render(_UP, {"": report is not None and report.nvml_up})
    yield render(_READY, {"": report is not None and not report.not_ready})
    if report is None:
        return
    if sampled_at is not None:
        yield render(_TAKEN, {"": round(sampled_at, 3)})
    yield render(_ERRORS, {label_text(_ERRORS.labels, (call, str(code))): n for (call, code), n in report.nvml_errors.items()})
    yield render(_STREAMS, {label_text(_STREAMS.labels, (resource,)): number for resource, number in report.streams.items()})
    yield render(_CONNECTIONS, {"": report.connections})
    yield render(_REFUSED, {"": report.connections_refused})
    yield render(_DISCONNECTS, {"": report.disconnects})
    if report.api_queue is not None:
        yield from _api_server(report.api_queue)
    yield from _mechanisms(report)


def _api_server(api_queue: ApiQueueState) -> Iterator[RenderedFamily]:
    yield render(_SERVER_UP, {"": not api_queue.away})
    yield render(_WAITING, {"": api_queue.waiting})
    yield render(_OLDEST, {"": max(0.0, api_queue.oldest_seconds)})
    yield render(_DROPPED, {"": api_queue.dropped})
    yield render(_RETRIES, {"": api_queue.eviction_retries})
    yield render(_UNREADABLE, {"": api_queue.unreadable})
    # All series exist from the start, so that a first refusal shows as an increase.
    writes = dict.fromkeys(((what, outcome) for what in WRITES for outcome in OUTCOMES), 0)
    for (what, outcome), times in api_queue.written.items():
        key = (what if what in WRITES else "other", outcome if outcome in OUTCOMES else "other")
        writes[key] = writes.get(key, 0) + times
    yield render(_WRITES, {label_text(_WRITES.labels, key): times for key, times in writes.items()})


def _mechanisms(report: NodeReport) -> Iterator[RenderedFamily]:
    unlimited = [s for s in current_shares(report.view.ledger) if not s.anonymous and not _enforced(s.mechanisms)]
    yield render(_UNENFORCED, {"": len(unlimited)})
    results = report.vcuda_registrations.items()
    yield render(_REGISTRATIONS, {label_text(_REGISTRATIONS.labels, (result,)): times for result, times in results})
    restarts = report.mps_daemon_restarts.items()
    yield render(_RESTARTS, {label_text(_RESTARTS.labels, (uuid,)): times for uuid, times in restarts})


def _enforced(mechanisms: tuple[str, ...]) -> bool:
    return any(name not in ("none", "mps-open") for name in mechanisms)
