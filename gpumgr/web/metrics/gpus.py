"""Renders the metrics of GPUs, as pure functions of a report. A value that the driver does not report has no series.

The label `gpu` is the GPU's UUID everywhere. Ratios are 0..1, memory is in bytes (Prometheus: base units only).
"""

from collections.abc import Callable, Iterator
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.prometheus_text import Family, RenderedFamily, gauge, label_text, render
from gpumgr.common.units import CORES_PER_GPU, GpuName, ratio
from gpumgr.ledger.ledger import Ledger, current_shares, granted_mebibytes
from gpumgr.ledger.usage.node_use import GpuUse
from gpumgr.placement.topology.devices import GpuSample, NodeSample

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
_NOT_READABLE: Final = gauge("gpus_not_readable", "GPUs of unknown UUID that the driver lists but can't describe.")
_NOT_LISTED: Final = gauge("gpus_not_listed", "GPUs on the PCI bus that the driver does not list.")
_CORDONED: Final = gauge("gpu_cordoned", "1 if an operator took the GPU out of service.", "gpu")
_LINKS: Final = gauge(
    "nvlink_active_links",
    "Active NVLinks between two GPUs (with NVSwitch: at least so many from each to the switches).",
    *("gpu", "peer"),
)
_CORES: Final = gauge("gpu_core_allocated_ratio", "Share of the GPU's cores that containers hold.", "gpu")
_MEMORY: Final = gauge("gpu_memory_allocated_bytes", "Memory that containers hold; all of a whole GPU's.", "gpu")
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
_UNACCOUNTED: Final[tuple[tuple[Family, Callable[[GpuUse], float | None]], ...]] = (
    (
        gauge("unaccounted_memory_bytes", "Memory of processes on the GPU without an allocation.", "gpu"),
        lambda use: use.unattributed_memory_bytes,
    ),
    (
        gauge("unaccounted_processes", "Processes on the GPU without an allocation.", "gpu"),
        lambda use: use.unattributed_processes,
    ),
)

FAMILIES: Final = (
    *(_INFO, _LIMITS, _TOTAL, _HEALTHY, _REASON, _NOT_READABLE, _NOT_LISTED, _CORDONED, _LINKS, _CORES, _MEMORY, _SHARERS),
    *(family for family, _ in _SAMPLED),
    *(family for family, _ in _UNACCOUNTED),
)


def render_gpus(report: NodeReport, *, node: str) -> Iterator[RenderedFamily]:
    """`node` is the name of the Kubernetes node. Families without a series are included."""
    yield from _hardware(report, node)
    # Left out while the driver does not answer, since old values would look current.
    sample = report.sample if report.sample and report.nvml_up else NodeSample()
    for family, read in _SAMPLED:
        yield render(family, {_gpu(uuid): value for uuid, gpu in sample.gpus.items() if (value := read(gpu)) is not None})
    yield from _healthy(report)
    yield _links(report)
    yield from _allocated(report.view.ledger)
    uses = report.use.gpus.values() if report.use and report.nvml_up else ()
    for unaccounted, count in _UNACCOUNTED:
        yield render(unaccounted, {_gpu(use.uuid): value for use in uses if (value := count(use)) is not None})


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
    """GPU -> number of containers with a share of it."""
    count: dict[GpuName, int] = {}
    for allocation in current_shares(ledger):
        for gpu in allocation.places:
            count[gpu] = count.get(gpu, 0) + 1
    return count
