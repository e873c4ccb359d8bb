"""The agent's metrics: counters of events, and gauges from the latest report of the node.

Every label has a bounded set of values. Counters only grow, also when a resource is registered again.

`Exposition` renders pages on a thread once a sample period, but only formats that were scraped recently. Rendering releases the GIL often,
so that an Allocate call need not wait until the page is complete.
"""

import asyncio
import gzip
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.ports import FindingCode
from gpumgr.common import prometheus_text
from gpumgr.common.aio import yielding_gil
from gpumgr.common.errors import RefusalCode
from gpumgr.common.prometheus_text import Family, RenderedFamily, page, render_metric
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, Resource
from gpumgr.compat.gpu_manager.metrics import render_gpu_manager
from gpumgr.compat.hami.metrics import render_hami
from gpumgr.enforcement.backend import BackendName
from gpumgr.placement.pods import PodView
from gpumgr.settings.schema import MetricsSettings
from gpumgr.web.metrics import containers
from gpumgr.web.metrics import node as node_metrics
from gpumgr.web.metrics.containers import render_containers
from gpumgr.web.metrics.node import render_agent, render_gpus
from gpumgr.web.responses import METRICS_TYPE, accepts

Drift = Literal["freed", "renamed", "adopted", "rejected"]

OUTCOMES: Final = ("ok", *get_args(RefusalCode), "cancelled")
#: Buckets for answers from memory, for the fsync of a commit, and for a disk that hangs.
_CALL_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_SUSPENSION_BUCKETS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LAG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
#: NVIDIA has assigned no higher XID.
_LAST_XID: Final = 999
#: All other values are counted as "other".
BACKENDS: Final = get_args(BackendName)
FINDINGS: Final = get_args(FindingCode)
#: The resources of a node with the profile tencent.
VCUDA: Final[Mapping[Resource, str]] = {"core": CORE_RESOURCE, "memory": MEMORY_RESOURCE}
#: RPC -> name in its metrics.
_CALLS: Final = {"Allocate": "allocate", "GetPreferredAllocation": "prefer", "PreStartContainer": "prestart"}
#: RPC of the DRA plugin API -> name in its metrics.
_CLAIM_CALLS: Final = {"NodePrepareResources": "prepare", "NodeUnprepareResources": "unprepare"}
#: Families that are rendered from a report.
_REPORT_FAMILIES: Final = (*node_metrics.FAMILIES, *containers.FAMILIES)
_DEFAULT_NAMES: Final = MetricsSettings()
Clocks = tuple[Callable[[], float], Callable[[], float]]


class Metrics:
    """All metrics of the agent. No method blocks, except `render`, which is for a thread.

    `pods` returns the node's known pods. `names` selects whether gpu-manager's and HAMi's gauges are also shown. `process` adds this
    process's memory, CPU time and file descriptors. `resources`: the offered resources -> their names; in mode dra the DRA driver's name
    `driver` replaces them.
    `clocks`: monotonic and unix time, in seconds.
    """

    def __init__(
        self,
        *,
        node: str,
        version: str,
        driver: str | None = None,
        resources: Mapping[Resource, str] = VCUDA,
        pods: Callable[[], Iterable[PodView]] = tuple,
        names: MetricsSettings = _DEFAULT_NAMES,
        clocks: Clocks = (time.monotonic, time.time),
        process: bool = True,
    ) -> None:
        self._node, self._pods, self._names, self._clocks = node, pods, names, clocks
        self._resources: dict[str, str] = {driver: driver} if driver else {str(kind): name for kind, name in resources.items()}
        self._registry = CollectorRegistry(auto_describe=False)
        self._counted: list[Family] = []
        self._make_kubelet_metrics(_CALLS if driver is None else _CLAIM_CALLS)
        self._make_node_metrics()
        build = self._gauge("build_info", "Version of gpumgr and of Python; always 1.", "version", "python")
        build.labels(version, platform.python_version()).set(1)
        if process:
            ProcessCollector(registry=self._registry)
        self._report: tuple[NodeReport | None, Sequence[PodView]] = (None, ())

    def _make_kubelet_metrics(self, served: Mapping[str, str]) -> None:
        """`served`: the RPCs of the node's mode. Their series exist from the start, so that a first event is an increase."""
        self._served: dict[str, tuple[Counter, Histogram]] = {}
        for rpc, name in (*_CALLS.items(), *_CLAIM_CALLS.items()):
            requests = self._counter(f"{name}_requests_total", f"{rpc} calls of the kubelet.", "resource", "outcome")
            about = f"How long {rpc} took, refusals included."
            seconds = self._histogram(f"{name}_duration_seconds", about, "resource", buckets=_CALL_BUCKETS)
            if rpc in served:
                self._served[rpc] = requests, seconds
        self._registered = self._gauge(
            "kubelet_registered", "1 while the resource, or the DRA driver, is registered.", "resource"
        )
        self._registrations = self._counter(
            "kubelet_registrations_total", "Successful registrations with the kubelet.", "resource"
        )
        self._counted_registrations: dict[str, int] = {}
        self._updates = self._counter("listandwatch_updates_total", "Device lists that were sent to the kubelet.", "resource")
        for kind, resource in self._resources.items():
            self.add_resource(kind, resource, listed=served is _CALLS)
        self._drift = self._counter("ledger_drift_total", "Allocations in which kubelet and ledger differed.", "kind")
        for drift in get_args(Drift):
            self._drift.labels(drift)

    def _make_node_metrics(self) -> None:
        self._xids = self._counter("gpu_xid_events_total", "XID errors that the driver reported.", "gpu", "xid")
        self._over_limit = self._counter("over_limit_total", "Containers that exceeded their memory.")
        self._evictions = self._counter("evictions_total", "Requested evictions of pods that stayed over their memory.")
        self._findings = self._counter(
            "enforcement_findings_total", "Findings of the mechanisms about containers' limits.", "backend", "code"
        )
        for backend in BACKENDS:
            for code in FINDINGS:
                self._findings.labels(backend, code)
        about = "How long the move of a container's memory to the host (suspend) or back (resume) took."
        self._suspensions = self._histogram("suspension_seconds", about, "operation", buckets=_SUSPENSION_BUCKETS)
        about = "GPU memory moved to the host (suspend) or back (resume)."
        self._moved_bytes = self._counter("suspension_moved_bytes_total", about, "operation")
        for operation in ("suspend", "resume"):
            self._suspensions.labels(operation)
            self._moved_bytes.labels(operation)
        about = "Time from the demand for a container's resume to its end."
        self._resume_waits = self._histogram("resume_wait_seconds", about, buckets=_SUSPENSION_BUCKETS)
        about = "How long one sample of all GPUs took."
        self._batch = self._histogram("nvml_batch_duration_seconds", about, buckets=_CALL_BUCKETS)
        about = "How late the event loop ran a timer."
        self._lag = self._histogram("event_loop_lag_seconds", about, buckets=_LAG_BUCKETS)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        family = self._declare(prometheus_text.gauge(name, about, *labels))
        return Gauge(family.name, about, labels, registry=self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        family = self._declare(prometheus_text.counter(name, about, *labels))
        return Counter(family.name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        family = self._declare(Family(name=f"gpumgr_{name}", about=about, kind="histogram", labels=labels))
        return Histogram(family.name, about, labels, buckets=buckets, registry=self._registry)

    def _declare(self, family: Family) -> Family:
        self._counted.append(family)
        return family

    @property
    def families(self) -> Sequence[Family]:
        """All families except gpu-manager's and HAMi's."""
        return (*self._counted, *_REPORT_FAMILIES)

    def apply(self, names: MetricsSettings) -> None:
        self._names = names

    def add_resource(self, kind: str, resource: str, *, listed: bool = True) -> None:
        """`listed`: whether the kubelet gets device lists of the resource, as it does in mode plugin."""
        self._resources[kind], self._counted_registrations[kind] = resource, 0
        for requests, seconds in self._served.values():
            for outcome in OUTCOMES:
                requests.labels(resource, outcome)
            seconds.labels(resource)
        for family in (self._registered, self._registrations, *([self._updates] if listed else [])):
            family.labels(resource)

    # -- events ------------------------------------------------------------------------------------------------------------

    def called(self, rpc: str, kind: str, outcome: str, seconds: float) -> None:
        """`kind`: the Resource, or the DRA driver. Calls that decide nothing (GetDevicePluginOptions) are not counted."""
        if rpc in self._served:
            requests, durations = self._served[rpc]
            requests.labels(self._resources[kind], outcome if outcome in OUTCOMES else "internal").inc()
            durations.labels(self._resources[kind]).observe(seconds)

    def drifted(self, what: Drift, count: int) -> None:
        """Reconciliation changed `count` allocations."""
        self._drift.labels(what).inc(count)

    def linked(self, kind: str, *, registered: bool, registrations: int) -> None:
        """`registrations`: the number of successful registrations since the process's start."""
        self._registered.labels(self._resources[kind]).set(registered)
        self._registrations.labels(self._resources[kind]).inc(max(0, registrations - self._counted_registrations[kind]))
        self._counted_registrations[kind] = registrations

    def listed(self, kind: str) -> None:
        """A new device list was sent to the kubelet."""
        self._updates.labels(self._resources[kind]).inc()

    def xid(self, uuid: str | None, number: int) -> None:
        """`uuid` is None if the driver names no GPU."""
        self._xids.labels(uuid or "", str(number) if 0 <= number <= _LAST_XID else "other").inc()

    def went_over(self) -> None:
        """A container exceeded its memory."""
        self._over_limit.inc()

    def moved(self, operation: str, seconds: float, memory_bytes: int) -> None:
        """`operation`: suspend or resume."""
        self._suspensions.labels(operation).observe(seconds)
        self._moved_bytes.labels(operation).inc(memory_bytes)

    def resumed(self, waited_seconds: float) -> None:
        """`waited_seconds`: from the demand for the resume to its end."""
        self._resume_waits.observe(waited_seconds)

    def evicted(self) -> None:
        self._evictions.inc()

    def found(self, backend: str, code: str) -> None:
        self._findings.labels(backend if backend in BACKENDS else "other", code if code in FINDINGS else "other").inc()

    def batched(self, seconds: float) -> None:
        """One sample of all GPUs took this long."""
        self._batch.observe(seconds)

    def lagged(self, seconds: float) -> None:
        """A timer of the event loop was this late."""
        self._lag.observe(seconds)

    # -- rendering ---------------------------------------------------------------------------------------------------------

    def set_report(self, report: NodeReport) -> None:
        """The next `render` shows the gauges of this report."""
        self._report = (report, tuple(self._pods()))

    def render(self) -> Iterator[RenderedFamily]:
        """Yields each family once. Takes milliseconds: call it on one thread at a time, not on the event loop."""
        report, pods = self._report
        yield from render_agent(report, sampled_at=self._sampled_at(report))
        if report is not None:
            yield from render_gpus(report, node=self._node)
            yield from render_containers(report)
            if self._names.gpu_manager_names:
                yield from render_gpu_manager(report, pods, node=self._node)
            if self._names.hami_names:
                yield from render_hami(report, pods, node=self._node)
        yield from map(render_metric, self._registry.collect())

    def _sampled_at(self, report: NodeReport | None) -> float | None:
        """The sample's unix time, computed from its age, because the wall clock may be set after the sample."""
        if report is None or report.sampled_at is None:
            return None
        monotonic, wall = self._clocks
        return wall() - max(0.0, monotonic() - report.sampled_at)


def catalogue() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels (without `le`) and help of all families of gpumgr, sorted by name."""
    families = Metrics(node="", version="").families
    return sorted((family.name, family.kind, family.labels, family.about) for family in families)


# -- scrapes -------------------------------------------------------------------------------------------------------------------

#: How long a format is rendered after its last scrape: longer than the usual interval between scrapes.
WANTED_SECONDS: Final = 150.0
#: Higher levels save few bytes of such text.
_GZIP_LEVEL: Final = 1
_OPENMETRICS_TYPE: Final = "application/openmetrics-text"
#: Whether the format is OpenMetrics -> the Content-Type.
_CONTENT_TYPES: Final = {
    False: METRICS_TYPE,
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
#: Whether the format is OpenMetrics, and whether the page is compressed.
_Variant = tuple[bool, bool]


class Exposition:
    """Call `refresh` once a sample period and `scrape` for each request, both on the event loop. `report` returns None before the first
    report."""

    def __init__(
        self, metrics: Metrics, report: Callable[[], NodeReport | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._report, self._clock = metrics, report, clock
        self._lock = asyncio.Lock()
        self._pages: dict[_Variant, bytes] = {}
        self._scraped_at: dict[_Variant, float] = {}

    async def refresh(self) -> None:
        """Renders the formats that were scraped recently, and drops the other pages."""
        async with self._lock:
            oldest = self._clock() - WANTED_SECONDS
            self._scraped_at = {variant: at for variant, at in self._scraped_at.items() if at >= oldest}
            self._pages = await self._render(*self._scraped_at) if self._scraped_at else {}

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body, in OpenMetrics and gzip if the request's headers name them."""
        variant = openmetrics, packed = accepts(accept, _OPENMETRICS_TYPE), accepts(accept_encoding, "gzip")
        self._scraped_at[variant] = self._clock()
        headers = {"Content-Type": _CONTENT_TYPES[openmetrics], "Vary": "Accept, Accept-Encoding"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        if variant not in self._pages:
            async with self._lock:  # simultaneous scrapes wait for one rendering
                if variant not in self._pages:
                    self._pages |= await self._render(variant)
        return headers, self._pages[variant]

    async def _render(self, *variants: _Variant) -> dict[_Variant, bytes]:
        if (report := self._report()) is not None:
            self._metrics.set_report(report)
        return await asyncio.to_thread(_rendered, self._metrics, variants)


def _rendered(metrics: Metrics, variants: Iterable[_Variant]) -> dict[_Variant, bytes]:
    families = list(yielding_gil(metrics.render()))
    texts = {openmetrics: page(families, openmetrics=openmetrics) for openmetrics in {variant[0] for variant in variants}}
    return {
        (openmetrics, packed): gzip.compress(texts[openmetrics], _GZIP_LEVEL, mtime=0) if packed else texts[openmetrics]
        for openmetrics, packed in variants
    }
