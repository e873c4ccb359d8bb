"""Metrics of containers: what they hold, use and may use. Pure functions of a report. A container that left the ledger has no series.

Only shares have limits; a container with whole GPUs has no series of limits. The limiter lets containers launch in turns: only containers
that it limits have series of their turns.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import yielding_gil
from gpumgr.common.prometheus_text import Family, LabelCache, RenderedFamily, counter, gauge, render
from gpumgr.common.units import CORES_PER_GPU, ratio
from gpumgr.ledger.ledger import Ledger, holdings
from gpumgr.ledger.usage.node_use import ContainerUse, TurnUse

#: The labels of every series about one container on one GPU.
CONTAINER_LABELS: Final = ("namespace", "pod", "container", "gpu")

#: Merges two values of one series: successive pods of one name have the same labels, and so have containers without a name yet.
Merge = Callable[[float, float], float]


def _family(name: str, about: str) -> Family:
    return gauge(f"container_{name}", about, *CONTAINER_LABELS)


def _counter(name: str, about: str) -> Family:
    return counter(f"container_{name}_total", about, *CONTAINER_LABELS)


def _of_turns(read: Callable[[TurnUse], float]) -> Callable[[ContainerUse], float | None]:
    """A container of an unknown pod has no value: several such containers have the same labels, and a counter must not drop when one of the
    containers ends."""
    return lambda use: None if use.turns is None or use.pod is None else read(use.turns)


def _newer(_: float, newer: float) -> float:
    """The value of the newer container, so the end of the older one changes nothing. The counter begins again with the newer container, as
    after a restart."""
    return newer


def _added_ratios(one: float, other: float) -> float:
    return min(1.0, one + other)


_CORES: Final = _family("core_allocated_ratio", "Share of the GPU's cores that the container holds.")
_MEMORY: Final = _family("memory_allocated_bytes", "Memory that the container holds; all of a whole GPU's.")
_OVER: Final = _family("over_limit", "1 while the container stays over its limit of memory.")
_READINGS: Final[tuple[tuple[Family, Callable[[ContainerUse], float | None], Merge], ...]] = (
    (
        _family("memory_used_bytes", "Memory that the container uses, by the driver's count."),
        lambda use: use.memory_bytes,
        operator.add,
    ),
    (
        _family("memory_request_bytes", "Memory granted to the container, also by a resize."),
        lambda use: use.memory_request_bytes,
        operator.add,
    ),
    (
        _family("memory_limit_bytes", "Memory that the container may use, with its burst."),
        lambda use: use.memory_limit_bytes,
        operator.add,
    ),
    (
        _family("core_utilization_ratio", "Share of the driver's sample period in which the container's kernels ran on the GPU."),
        lambda use: ratio(use.utilization_ratio),
        _added_ratios,
    ),
    (
        _family("core_limit_ratio", "Share of the GPU's cores that the container was granted."),
        lambda use: None if use.memory_limit_bytes is None else use.cores / CORES_PER_GPU,
        _added_ratios,
    ),
    (_family("processes", "Processes of the container on the GPU."), lambda use: use.process_count, operator.add),
    (
        _family("over_limit_ratio", "Memory that the container uses, relative to its limit."),
        lambda use: (
            use.memory_bytes / use.memory_limit_bytes if use.memory_limit_bytes and use.memory_bytes is not None else None
        ),
        max,
    ),
    (
        _counter("held_seconds", "How long the container held the GPU (limiter)."),
        _of_turns(lambda turns: turns.held_seconds),
        _newer,
    ),
    (
        _counter("waited_seconds", "How long the container waited for a turn (limiter)."),
        _of_turns(lambda turns: turns.waited_seconds),
        _newer,
    ),
    (
        _counter("launches", "Kernels, graphs and large copies that the container launched (limiter)."),
        _of_turns(lambda turns: turns.launches),
        _newer,
    ),
    (
        _counter("overruns", "Turns that ended before the container's work (limiter)."),
        _of_turns(lambda turns: turns.overruns),
        _newer,
    ),
)
_KINDS: Final = gauge(
    "container_memory_by_kind_bytes",
    "Memory of the container by the kind of the allocation (limiter).",
    *CONTAINER_LABELS,
    "kind",
)

_SUSPENSION: Final = gauge(
    "container_suspension",
    "1 for the state: suspending, suspended, resuming or failed; no series otherwise.",
    *CONTAINER_LABELS,
    "state",
)

FAMILIES: Final = (_CORES, _MEMORY, _OVER, _KINDS, _SUSPENSION, *(family for family, _, _ in _READINGS))


def render_containers(report: NodeReport, texts: LabelCache) -> Iterator[RenderedFamily]:
    """`texts`: the label texts of CONTAINER_LABELS. Families without a series are included."""
    yield from _held(report.view.ledger, texts)
    # While the driver does not answer, old values would look current.
    use = report.use.of(report.view.ledger.allocations) if report.use and report.nvml_up else None
    granted = report.view.ledger.allocations
    ordered = sorted(use.containers.values() if use else (), key=lambda each: granted[each.allocation].granted_at)
    named = [(_labels(each, texts), each) for each in yielding_gil(ordered)]
    for family, read, merge in _READINGS:
        yield render(family, _merged(named, read, merge))
    yield render(_KINDS, _by_kind(named))
    states = report.view.suspensions
    yield render(
        _SUSPENSION,
        {
            f'{labels},state="{known.state}"': 1.0
            for labels, each in named
            if (known := states.get(each.allocation)) and known.state != "running"
        },
    )
    over = report.over
    yield render(
        _OVER, _merged(named, lambda use: None if use.memory_limit_bytes is None else (use.allocation, use.gpu) in over, max)
    )


def _labels(use: ContainerUse, texts: LabelCache) -> str:
    namespace, pod = use.pod or ("", "")
    return texts.of(namespace, pod, use.container or "", use.uuid)


def _merged(
    named: list[tuple[str, ContainerUse]], read: Callable[[ContainerUse], float | None], merge: Merge
) -> dict[str, float]:
    series: dict[str, float] = {}
    for labels, use in named:
        if (value := read(use)) is not None:
            series[labels] = value if (before := series.get(labels)) is None else merge(before, value)
    return series


def _by_kind(named: list[tuple[str, ContainerUse]]) -> dict[str, float]:
    series: dict[str, float] = {}
    for labels, use in named:
        for kind, size in use.turns.memory_bytes_by_kind.items() if use.turns else ():
            key = f'{labels},kind="{kind}"'
            series[key] = series.get(key, 0) + size
    return series


def _held(ledger: Ledger, texts: LabelCache) -> Iterator[RenderedFamily]:
    held: dict[str, tuple[int, int]] = {}
    for allocation in yielding_gil(ledger.allocations.values()):
        namespace, pod = allocation.pod or ("", "")
        for registered, cores, mebibytes in holdings(allocation, ledger.gpu_registry):
            labels = texts.of(namespace, pod, allocation.container or "", registered.uuid)
            cores_before, memory_before = held.get(labels, (0, 0))
            held[labels] = (cores_before + cores, memory_before + mebibytes)
    yield render(_CORES, {labels: cores / CORES_PER_GPU for labels, (cores, _) in held.items()})
    yield render(_MEMORY, {labels: mebibytes << 20 for labels, (_, mebibytes) in held.items()})
