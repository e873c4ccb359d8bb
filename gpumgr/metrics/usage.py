"""What containers use, and what keeps them within their shares, as metric families: pure functions of a picture.

Limits are those of shares; a container with whole GPUs has none and no series of one. Whoever has left the ledger has no series.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpumgr.agent.picture import Picture
from gpumgr.metrics.gauges import CONTAINER_LABELS, current_shares, gauge
from gpumgr.units import CORES_PER_GPU
from gpumgr.usage.picture import ContainerUse, GpuUse

_READINGS: Final[tuple[tuple[str, str, Callable[[ContainerUse], float | None]], ...]] = (
    (
        "memory_used_bytes",
        "Memory that the container's processes use on the GPU, as the driver counts it.",
        lambda use: use.memory_bytes,
    ),
    ("memory_limit_bytes", "Memory of the GPU that the container was granted.", lambda use: use.memory_limit_bytes),
    (
        "core_utilization_ratio",
        "Share of the driver's sample period in which the container's kernels ran on the GPU.",
        lambda use: use.utilization_ratio,
    ),
    (
        "core_limit_ratio",
        "Share of the GPU's cores that the container was granted.",
        lambda use: None if use.memory_limit_bytes is None else use.cores / CORES_PER_GPU,
    ),
    (
        "processes",
        "Processes of the container that use the GPU.",
        lambda use: use.process_count,
    ),
)
_UNACCOUNTED: Final[tuple[tuple[str, str, Callable[[GpuUse], float]], ...]] = (
    (
        "unaccounted_memory_bytes",
        "Memory in use on the GPU by processes that no allocation lets be there.",
        lambda gpu: gpu.stranger_memory_bytes,
    ),
    (
        "unaccounted_processes",
        "Processes on the GPU that no allocation lets be there.",
        lambda gpu: gpu.stranger_processes,
    ),
)


def usage_families(picture: Picture) -> Iterator[Metric]:
    """All families about use and limits; those without a sample are in it too."""
    uses = _uses(picture)
    for name, about, read in _READINGS:
        yield _summed(name, about, uses, read)
    yield _over(picture, uses)
    for name, about, count in _UNACCOUNTED:
        family = gauge(name, about, "gpu")
        for gpu in picture.use.gpus.values() if picture.use and picture.nvml_up else ():
            family.add_metric([gpu.uuid], count(gpu))
        yield family
    yield from _mechanisms(picture)


def _uses(picture: Picture) -> list[ContainerUse]:
    # Numbers from before the driver went away would look like news.
    if picture.use is None or not picture.nvml_up:
        return []
    return list(picture.use.of(picture.view.ledger.allocations).containers.values())


def _labels(use: ContainerUse) -> tuple[str, str, str, str]:
    namespace, pod = use.pod or ("", "")
    return namespace, pod, use.container or "", use.uuid


def _summed(name: str, about: str, uses: list[ContainerUse], read: Callable[[ContainerUse], float | None]) -> GaugeMetricFamily:
    """Sums: two lives of one name, and holders without a name yet, would make one series twice."""
    sums: dict[tuple[str, str, str, str], float] = {}
    for use in uses:
        if (value := read(use)) is not None:
            labels = _labels(use)
            sums[labels] = sums.get(labels, 0) + value
    family = gauge(f"container_{name}", about, *CONTAINER_LABELS)
    for labels, value in sums.items():
        family.add_metric(labels, value)
    return family


def _over(picture: Picture, uses: list[ContainerUse]) -> GaugeMetricFamily:
    family = gauge(
        "container_over_limit", "1 while the container has stayed over the memory that it was granted.", *CONTAINER_LABELS
    )
    over: dict[tuple[str, str, str, str], bool] = {}
    for use in uses:
        if use.memory_limit_bytes is not None:
            labels = _labels(use)
            over[labels] = over.get(labels, False) or use.allocation in picture.over
    for labels, value in over.items():
        family.add_metric(labels, value)
    return family


def _mechanisms(picture: Picture) -> Iterator[Metric]:
    info = gauge("enforcement_info", "What keeps new shares within their limits; always 1.", "backend", "limits")
    for backend, limits in picture.enforcement:
        info.add_metric([backend, limits], 1)
    yield info
    free = gauge("containers_without_enforcement", "Containers that share a GPU and that nothing keeps within their shares.")
    free.add_metric(
        [], sum(1 for share in current_shares(picture.view.ledger) if not share.anonymous and not _kept(share.mechanisms))
    )
    yield free
    registrations = CounterMetricFamily(
        "gpumgr_vcuda_registrations", "Registrations of processes with the backend vcuda.", labels=("result",)
    )
    for result, times in picture.vcuda_registrations.items():
        registrations.add_metric([result], times)
    yield registrations
    restarts = CounterMetricFamily("gpumgr_mps_daemon_restarts", "Crashed MPS daemons that were started again.", labels=("gpu",))
    for uuid, times in picture.mps_daemon_restarts.items():
        restarts.add_metric([uuid], times)
    yield restarts


def _kept(mechanisms: tuple[str, ...]) -> bool:
    return any(name not in ("none", "mps-open") for name in mechanisms)
