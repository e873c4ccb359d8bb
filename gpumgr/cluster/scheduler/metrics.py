"""The scheduler's metrics. Verbs (kube-scheduler's calls) are counted when they end; all other values are read at each scrape."""

import platform
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, get_args

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

import gpumgr
from gpumgr.cluster.core.node import GPU_PARTS, PARTS, Totals
from gpumgr.cluster.scheduler.api import KINDS, Kind
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.objects import Inventory
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.cluster.scheduler.wire import FilterResult, PreemptResult
from gpumgr.common.prometheus_text import Family, gauge, page, render_all, render_metric
from gpumgr.web.responses import metrics_response

VERBS: Final = ("filter", "prioritize", "bind", "preempt")
#: "rejected": the answer names no node. "error": the answer is an error. "unavailable": another replica is to answer (HTTP 503).
OUTCOMES: Final = ("ok", "rejected", "error", "unavailable")
#: Values of the labels -> value.
Samples = Mapping[tuple[str, ...], float]
#: Upper bounds in seconds, up to 2 s, which is httpTimeout in config/scheduler/kube-scheduler.yaml.
_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0)

_SECONDS: Final = Family(
    name="gpumgr_scheduler_request_duration_seconds",
    about="How long the extender took to answer a call of kube-scheduler. A rejection names no node.",
    kind="histogram",
    labels=("verb", "outcome"),
)
_NODES: Final = gauge(
    "scheduler_nodes",
    "Nodes with GPUs, by the state of their inventory annotation: used, outdated (it has more GPUs than the kubelet of the Ready node "
    "offers), unusable (see the log), none (the node's capacity counts).",
    "inventory",
)
_PLACED: Final = gauge("scheduler_placed_pods", "Pods with GPUs in the index, bound and assumed.")
_ASSUMED: Final = gauge("scheduler_assumed_pods", "Pods with assumed GPUs, which are not bound yet.")
_WAITING: Final = gauge(
    "scheduler_waiting_pods",
    "Pods with GPU requests that are not bound, by reason: refused, quota, resources, fragmentation, elsewhere, unexamined "
    "(docs/scheduler.md).",
    "reason",
)
_GPUS: Final = gauge(
    "scheduler_gpus",
    "GPUs by model and part: free, partial (partly used), full, closed (unhealthy or cordoned).",
    "model",
    "part",
)
_CORES: Final = gauge(
    "scheduler_gpu_cores_ratio",
    "Cores by model and part, 1 = all cores of one GPU: used, free (on entirely free GPUs), partial (free on partly used GPUs), stranded "
    "(free on GPUs without free memory, or without a place for a MIG device), closed.",
    "model",
    "part",
)
_MEMORY: Final = gauge(
    "scheduler_gpu_memory_bytes",
    "GPU memory by model and part, as the cores; stranded: free on GPUs without free cores, or without a place for a MIG device.",
    "model",
    "part",
)


def process_gauges(process: str, leader: str) -> Mapping[Family, Callable[[ClusterWatches, bool], Samples]]:
    """Gauges of a process with watches and a Lease. The functions take the watches, and whether the process leads. `leader`: what the
    leader does, for the help text."""
    return {
        gauge(f"{process}_build_info", "Version of gpumgr and of Python; always 1.", "version", "python"): lambda *_: {
            (gpumgr.__version__, platform.python_version()): 1
        },
        gauge(f"{process}_leader", f"1 on the replica that {leader}."): lambda _, leads: {(): leads},
        gauge(f"{process}_synced", "1 once all objects have been read."): lambda watches, _: {(): watches.synced},
        gauge(
            f"{process}_api_objects_unreadable", "Objects in the watches that can't be read; their last readable state is used."
        ): lambda watches, _: {(): watches.unreadable},
        gauge(
            f"{process}_api_silence_seconds",
            "Seconds since the API server last sent something or ended a watch at its normal end, by resource.",
            "resource",
        ): lambda watches, _: {(resource,): round(seconds, 1) for resource, seconds in watches.silences.items()},
    }


_PROCESS: Final = process_gauges("scheduler", "answers kube-scheduler")
FAMILIES: Final = (_SECONDS, *_PROCESS, _NODES, _PLACED, _ASSUMED, _WAITING, _GPUS, _CORES, _MEMORY)


class SchedulerMetrics:
    def __init__(self, watches: ClusterWatches, rows: NodeRows, *, leader: Callable[[], bool]) -> None:
        self._index, self._watches, self._rows, self._leader = watches.index, watches, rows, leader
        self._registry = CollectorRegistry(auto_describe=False)
        seconds = Histogram(_SECONDS.name, _SECONDS.about, _SECONDS.labels, buckets=_BUCKETS, registry=self._registry)
        self._seconds = {(verb, outcome): seconds.labels(verb, outcome) for verb in VERBS for outcome in OUTCOMES}
        ProcessCollector(registry=self._registry)

    def answered(self, verb: str, outcome: str, seconds: float) -> None:
        self._seconds[verb, outcome].observe(seconds)

    async def response(self, waiting: Counter[Kind | None]) -> web.Response:
        """`waiting`: how many pods wait for each reason; None: not examined. Refresh the rows first."""
        totals = await self._rows.totals()
        inventories = Counter(node.inventory for node in self._rows.nodes.values())
        families: dict[Family, Samples] = {
            **{family: read(self._watches, self._leader()) for family, read in _PROCESS.items()},
            _NODES: {(kind,): inventories[kind] for kind in get_args(Inventory)},
            _PLACED: {(): self._index.placed_pods},
            _ASSUMED: {(): len(self._index.assumed)},
            _WAITING: {(kind or "unexamined",): waiting[kind] for kind in (*KINDS, None)},
            _GPUS: _by_model(totals, "gpus", GPU_PARTS, 1),
            _CORES: _by_model(totals, "cores", PARTS, 0.01),
            _MEMORY: _by_model(totals, "memory", PARTS, 1 << 20),
        }
        rendered = [*render_all(families), *map(render_metric, self._registry.collect())]
        return metrics_response(page(rendered, openmetrics=False))


def outcome_of(result: object) -> str:
    if getattr(result, "error", ""):
        return "error"
    match result:
        case FilterResult():
            found = bool(result.node_names or (result.nodes or {}).get("items"))
        case PreemptResult():
            found = bool(result.victims)
        case _:
            found = True
    return "ok" if found else "rejected"


def _by_model(totals: Totals, what: str, parts: tuple[str, ...], unit: float) -> dict[tuple[str, ...], float]:
    """(Model, part) -> amount. A part that is 0 is included, so that its first amount shows as an increase."""
    models = {model for counted, model, _ in totals if counted == what}
    return {(model or "unknown", part): round(totals[what, model, part] * unit, 2) for model in models for part in parts}
