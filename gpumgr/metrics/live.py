"""The station's face: counts what happens while it happens, and draws the rest from the picture of the moment.

Law 1. Every label is bounded: resources, outcomes and reasons are closed sets; GPUs, pods and containers are those of the node now.
Law 2. Counters only grow, whatever registers again.
"""

import platform
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpumgr.agent.picture import Picture
from gpumgr.errors import RefusalCode
from gpumgr.metrics.gauges import picture_families
from gpumgr.metrics.usage import usage_families
from gpumgr.units import KINDS, RESOURCE_OF, Kind

Drift = Literal["freed", "renamed", "adopted", "rejected"]

OUTCOMES: Final = ("ok", *get_args(RefusalCode), "cancelled")
#: From an answer out of memory to a stuck disk; the commit's fsync lies in the middle.
_CALL_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_LAG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
#: XIDs beyond every number that NVIDIA has given out count together.
_LAST_XID: Final = 999
#: Mechanisms, and what they find; others count together.
BACKENDS: Final = ("mps", "mps-open", "hami-core", "vcuda", "nvml-memory", "none")
FINDINGS: Final = ("tampered", "unregistered", "broken", "over_limit")
#: RPC of the device plugin API -> what its metrics are called.
_CALLS: Final = {"Allocate": "allocate", "GetPreferredAllocation": "prefer", "PreStartContainer": "prestart"}


class Registration(Protocol):
    """One resource as the kubelet has it."""

    @property
    def registered(self) -> bool: ...

    @property
    def registrations(self) -> int:
        """Successful Register calls since the start of the process."""
        ...


class Metrics:
    """All metrics of the agent, in a registry of its own. Its methods are called on the event loop and never block."""

    def __init__(
        self,
        *,
        node: str,
        version: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        process: bool = True,
    ) -> None:
        """`node` is the Kubernetes node's name; `process` adds memory, CPU and file descriptors of this process."""
        # A start time for every counter would double the series; process_start_time_seconds says the same once.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self._calls = {rpc: _CallMeter(name, rpc, self.registry) for rpc, name in _CALLS.items()}
        self._registered = self._gauge("kubelet_registered", "1 while the kubelet has the resource from us.", "resource")
        self._registrations = self._counter("kubelet_registrations", "Successful registrations with the kubelet.", "resource")
        self._updates = self._counter("listandwatch_updates", "Device lists that were offered to the kubelet.", "resource")
        self._drift = self._counter("book_reconcile_drift", "Allocations in which kubelet and ledger differed.", "kind")
        self._xids = self._counter("gpu_xid_events", "XID errors that the driver reported.", "gpu", "xid")
        self._over_limit = self._counter("over_limit", "Containers that went over the memory that they were granted.")
        self._evictions = self._counter(
            "evictions", "Pods whose eviction was asked for because a container stayed over its memory."
        )
        self._findings = self._counter(
            "enforcement_findings", "What mechanisms found wrong with containers' limits.", "backend", "code"
        )
        self._batch = Histogram(
            "gpumgr_nvml_batch_duration_seconds",
            "How long one sample of all GPUs took.",
            buckets=_CALL_BUCKETS,
            registry=self.registry,
        )
        self._lag = Histogram(
            "gpumgr_event_loop_lag_seconds",
            "How late the event loop got back to a timer.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        build = self._gauge("build_info", "What runs here; always 1.", "version", "python")
        build.labels(version, platform.python_version()).set(1)
        for kind in KINDS:
            for family in (self._registered, self._registrations, self._updates):
                family.labels(RESOURCE_OF[kind])
        for drift in get_args(Drift):
            self._drift.labels(drift)
        for backend in BACKENDS:
            for code in FINDINGS:
                self._findings.labels(backend, code)
        self._told_registrations = dict.fromkeys(KINDS, 0)
        self._pictures = _PictureCollector(node, clock, wall_clock)
        self.registry.register(self._pictures)
        if process:
            ProcessCollector(registry=self.registry)

    def called(self, rpc: str, kind: Kind, outcome: str, seconds: float) -> None:
        """A call of the kubelet's has ended. Calls that decide nothing (the options) are not counted."""
        if rpc in self._calls:
            self._calls[rpc].count(kind, outcome, seconds)

    def drifted(self, what: Drift, count: int) -> None:
        """Reconciling changed `count` allocations."""
        self._drift.labels(what).inc(count)

    def linked(self, kind: Kind, state: Registration) -> None:
        """The registration of a resource changed."""
        self._registered.labels(RESOURCE_OF[kind]).set(state.registered)
        news = state.registrations - self._told_registrations[kind]
        self._told_registrations[kind] = state.registrations
        if news > 0:
            self._registrations.labels(RESOURCE_OF[kind]).inc(news)

    def listed(self, kind: Kind) -> None:
        """The kubelet is offered another device list."""
        self._updates.labels(RESOURCE_OF[kind]).inc()

    def xid(self, uuid: str | None, number: int) -> None:
        """The driver reported an XID; `uuid` None = it does not say of which GPU."""
        self._xids.labels(uuid or "", str(number) if 0 <= number <= _LAST_XID else "other").inc()

    def went_over(self) -> None:
        """A container has stayed over its memory."""
        self._over_limit.inc()

    def evicted(self) -> None:
        """A pod's eviction was asked for."""
        self._evictions.inc()

    def found(self, backend: str, code: str) -> None:
        """A mechanism found something wrong with a container's limits."""
        self._findings.labels(backend if backend in BACKENDS else "other", code if code in FINDINGS else "other").inc()

    def batched(self, seconds: float) -> None:
        """A sample of all GPUs took this long."""
        self._batch.observe(seconds)

    def lagged(self, seconds: float) -> None:
        """The event loop came back to a timer this late."""
        self._lag.observe(seconds)

    def show(self, picture: Picture) -> None:
        """The picture from which the next rendering draws its gauges."""
        self._pictures.picture = picture

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"gpumgr_{name}", about, labels, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"gpumgr_{name}_total", about, labels, registry=self.registry)


class _CallMeter:
    """Outcomes and durations of one RPC. All series stand from the start, so that a first refusal shows as an increase."""

    def __init__(self, name: str, rpc: str, registry: CollectorRegistry) -> None:
        requests = Counter(
            f"gpumgr_{name}_requests_total", f"{rpc} calls of the kubelet's.", ("resource", "outcome"), registry=registry
        )
        seconds = Histogram(
            f"gpumgr_{name}_duration_seconds",
            f"How long {rpc} took, refusals included.",
            ("resource",),
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._requests = {(k, outcome): requests.labels(RESOURCE_OF[k], outcome) for k in KINDS for outcome in OUTCOMES}
        self._seconds = {kind: seconds.labels(RESOURCE_OF[kind]) for kind in KINDS}

    def count(self, kind: Kind, outcome: str, seconds: float) -> None:
        self._requests[kind, outcome if outcome in OUTCOMES else "internal"].inc()
        self._seconds[kind].observe(seconds)


class _PictureCollector(Collector):
    def __init__(self, node: str, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.picture: Picture | None = None
        self._node, self._clock, self._wall_clock = node, clock, wall_clock

    def collect(self) -> Iterator[Metric]:
        picture = self.picture  # once: the event loop may put another one there meanwhile
        up = GaugeMetricFamily("gpumgr_nvml_up", "1 while the driver's library answers.")
        up.add_metric([], picture is not None and picture.nvml_up)
        yield up
        if picture is None:
            return
        if picture.sampled_at is not None:
            taken = GaugeMetricFamily(
                "gpumgr_nvml_last_sample_timestamp_seconds", "When the GPUs were last sampled, in unix time."
            )
            # From its age, so that a wall clock that was set meanwhile doesn't make it older or younger.
            taken.add_metric([], round(self._wall_clock() - (self._clock() - picture.sampled_at), 3))
            yield taken
        errors = CounterMetricFamily(
            "gpumgr_nvml_call_errors", "Calls of the driver's library that went wrong.", labels=("function", "code")
        )
        for (function, code), times in picture.nvml_errors.items():
            errors.add_metric([function, str(code)], times)
        yield errors
        streams = GaugeMetricFamily(
            "gpumgr_listandwatch_streams", "Open ListAndWatch calls of the kubelet.", labels=("resource",)
        )
        for resource, number in picture.streams.items():
            streams.add_metric([resource], number)
        yield streams
        yield from picture_families(picture, node=self._node)
        yield from usage_families(picture)
