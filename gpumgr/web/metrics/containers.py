"""Metrics of containers: what they hold, use and may use. Pure functions of a report.

Only containers that share a GPU have series of limits. Only containers with the backend limiter have series of turns: a turn is a time in
which the limiter lets a container launch work.
"""

from collections.abc import Callable, Iterator
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.aio import yielding_gil
from gpumgr.common.prometheus_text import Family, RenderedFamily, counter, gauge, kept_label_text, render
from gpumgr.common.units import CORES_PER_GPU, ratio
from gpumgr.ledger.ledger import Ledger, holdings
from gpumgr.ledger.node_use import ContainerUse, TurnUse

CONTAINER_LABELS: Final = ("namespace", "pod", "container", "gpu")


def _family(name: str, about: str) -> Family:
    return gauge(f"container_{name}", about, *CONTAINER_LABELS)


def _counter(name: str, about: str) -> Family:
    return counter(f"container_{name}_total", about, *CONTAINER_LABELS)


def _of_turns(read: Callable[[TurnUse], float]) -> Callable[[ContainerUse], float | None]:
    """None for an unknown pod: several such containers have the same labels, and a counter must not drop when one of them ends."""
    return lambda use: None if use.turns is None or use.pod is None else read(use.turns)


_CORES: Final = _family("core_allocated_ratio", "Share of the GPU's cores that the container holds.")
_MEMORY: Final = _family("memory_allocated_bytes", "Memory that the container holds; for a whole GPU all its memory.")
_OVER: Final = _family("over_limit", "1 while the container stays over its limit of memory.")
_READINGS: Final[tuple[tuple[Family, Callable[[ContainerUse], float | None]], ...]] = (
    (
        _family("memory_used_bytes", "Memory that the container uses, by the driver's count."),
        lambda use: use.memory_bytes,
    ),
    (
        _family("memory_request_bytes", "Memory granted to the container, also by a resize."),
        lambda use: use.memory_request_bytes,
    ),
    (
        _family("memory_limit_bytes", "Memory that the container may use, with its burst."),
        lambda use: use.memory_limit_bytes,
    ),
    (
        _family("core_utilization_ratio", "Share of the driver's sample period in which the container's kernels ran on the GPU."),
        lambda use: ratio(use.utilization_ratio),
    ),
    (
        _family("core_limit_ratio", "Cores that the container may use, as a share of the GPU's; only if it shares the GPU."),
        lambda use: None if use.memory_limit_bytes is None else use.cores / CORES_PER_GPU,
    ),
    (_family("processes", "Processes of the container on the GPU."), lambda use: use.process_count),
    (
        _family("over_limit_ratio", "Memory that the container uses, relative to its limit."),
        lambda use: (
            use.memory_bytes / use.memory_limit_bytes if use.memory_limit_bytes and use.memory_bytes is not None else None
        ),
    ),
    (
        _counter("held_seconds", "How long the container held the GPU (limiter)."),
        _of_turns(lambda turns: turns.held_seconds),
    ),
    (
        _counter("waited_seconds", "How long the container waited for a turn (limiter)."),
        _of_turns(lambda turns: turns.waited_seconds),
    ),
    (
        _counter("launches", "Kernels, graphs and large copies that the container launched (limiter)."),
        _of_turns(lambda turns: turns.launches),
    ),
    (
        _counter("overruns", "Turns that were taken from the container while its work still ran (limiter)."),
        _of_turns(lambda turns: turns.overruns),
    ),
)
_KINDS: Final = gauge(
    "container_memory_by_kind_bytes",
    "Memory of the container by the kind of CUDA memory (limiter).",
    *CONTAINER_LABELS,
    "kind",
)

_SUSPENSION: Final = gauge(
    "container_suspension",
    "1 for the state: suspending, suspended, resuming or failed; no series otherwise.",
    *CONTAINER_LABELS,
    "state",
)

FAMILIES: Final = (_CORES, _MEMORY, _OVER, _KINDS, _SUSPENSION, *(family for family, _ in _READINGS))


def render_containers(report: NodeReport) -> Iterator[RenderedFamily]:
    yield from _held(report.view.ledger)
    granted = report.view.ledger.allocations
    uses = report.current_use.of(granted).containers.values()
    ordered = sorted(uses, key=lambda each: granted[each.allocation].granted_at)
    named = [(_labels(each), each) for each in yielding_gil(ordered)]
    for family, read in _READINGS:
        yield render(family, _series(named, read))
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
    yield render(_OVER, _series(named, lambda use: None if use.memory_limit_bytes is None else (use.allocation, use.gpu) in over))


def _labels(use: ContainerUse) -> str:
    namespace, pod = use.pod or ("", "")
    return kept_label_text(CONTAINER_LABELS, namespace, pod, use.container or "", use.uuid)


def _series(named: list[tuple[str, ContainerUse]], read: Callable[[ContainerUse], float | None]) -> dict[str, float]:
    """Successive pods of one name, and containers without a name yet, have the same labels. The newest one counts, so the end of an older
    one changes nothing."""
    return {labels: value for labels, use in named if (value := read(use)) is not None}


def _by_kind(named: list[tuple[str, ContainerUse]]) -> dict[str, float]:
    return {
        f'{labels},kind="{kind}"': size
        for labels, use in named
        if use.turns
        for kind, size in use.turns.memory_bytes_by_kind.items()
    }


def _held(ledger: Ledger) -> Iterator[RenderedFamily]:
    held: dict[str, tuple[int, int]] = {}
    for allocation in yielding_gil(ledger.allocations.values()):
        namespace, pod = allocation.pod or ("", "")
        for registered, cores, mebibytes in holdings(allocation, ledger.gpu_registry):
            labels = kept_label_text(CONTAINER_LABELS, namespace, pod, allocation.container or "", registered.uuid)
            cores_before, memory_before = held.get(labels, (0, 0))
            held[labels] = (cores_before + cores, memory_before + mebibytes)
    yield render(_CORES, {labels: cores / CORES_PER_GPU for labels, (cores, _) in held.items()})
    yield render(_MEMORY, {labels: mebibytes << 20 for labels, (_, mebibytes) in held.items()})
