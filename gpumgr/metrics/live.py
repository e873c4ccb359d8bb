"""The station's face: counts what happens while it happens, and draws the rest from the picture of the moment.

Law 1. Every label is bounded: resources, outcomes and reasons are closed sets; GPUs, pods and containers are those of the node now.
Law 2. Counters only grow, whatever registers again.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, Protocol, get_args

from prometheus_client import ProcessCollector

from gpumgr.agent.picture import Picture
from gpumgr.allocator.pods import PodView
from gpumgr.errors import RefusalCode
from gpumgr.metrics import drawing
from gpumgr.metrics.drawing import Drawing
from gpumgr.metrics.instruments import Instruments
from gpumgr.metrics.text import Block, drawn
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
    """All metrics of the agent. Its methods are called on the event loop and never block, but for `blocks`."""

    def __init__(
        self,
        *,
        node: str,
        version: str,
        pods: Callable[[], Iterable[PodView]] = tuple,
        gpu_manager_names: bool = True,
        hami_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        process: bool = True,
    ) -> None:
        """`node` is the Kubernetes node's name, `pods` gives the pods that are known on it. `gpu_manager_names` and `hami_names` add
        those agents' gauges, `process` adds memory, CPU and file descriptors of this process."""
        make = Instruments()
        self._registry = make.registry
        self._calls = {rpc: _CallMeter(name, rpc, make) for rpc, name in _CALLS.items()}
        self._registered = make.gauge("kubelet_registered", "1 while the kubelet has the resource from us.", "resource")
        self._registrations = make.counter(
            "kubelet_registrations_total", "Successful registrations with the kubelet.", "resource"
        )
        self._updates = make.counter("listandwatch_updates_total", "Device lists that were offered to the kubelet.", "resource")
        self._drift = make.counter("book_reconcile_drift_total", "Allocations in which kubelet and ledger differed.", "kind")
        self._xids = make.counter("gpu_xid_events_total", "XID errors that the driver reported.", "gpu", "xid")
        self._over_limit = make.counter("over_limit_total", "Containers that went over the memory that they were granted.")
        self._evictions = make.counter(
            "evictions_total", "Pods whose eviction was asked for because a container stayed over its memory."
        )
        self._findings = make.counter(
            "enforcement_findings_total", "What mechanisms found wrong with containers' limits.", "backend", "code"
        )
        self._batch = make.histogram(
            "nvml_batch_duration_seconds", "How long one sample of all GPUs took.", buckets=_CALL_BUCKETS
        )
        self._lag = make.histogram("event_loop_lag_seconds", "How late the event loop got back to a timer.", buckets=_LAG_BUCKETS)
        build = make.gauge("build_info", "What runs here; always 1.", "version", "python")
        build.labels(version, platform.python_version()).set(1)
        self._stand_from_the_start()
        self._told_registrations = dict.fromkeys(KINDS, 0)
        self.families = (*make.families, *drawing.FAMILIES)
        self._drawing = Drawing(
            node=node, gpu_manager_names=gpu_manager_names, hami_names=hami_names, clock=clock, wall_clock=wall_clock
        )
        self._pods = pods
        self._shown: tuple[Picture | None, Sequence[PodView]] = (None, ())
        if process:
            ProcessCollector(registry=self._registry)

    def _stand_from_the_start(self) -> None:
        """So that a first time shows as an increase."""
        for kind in KINDS:
            for family in (self._registered, self._registrations, self._updates):
                family.labels(RESOURCE_OF[kind])
        for drift in get_args(Drift):
            self._drift.labels(drift)
        for backend in BACKENDS:
            for code in FINDINGS:
                self._findings.labels(backend, code)

    def name_too(self, *, gpu_manager: bool, hami: bool) -> None:
        """Whether those agents' gauges stand beside our own, from the next page on."""
        self._drawing.gpu_manager_names, self._drawing.hami_names = gpu_manager, hami

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
        """The picture from which the next page draws its gauges."""
        self._shown = (picture, tuple(self._pods()))

    def blocks(self) -> Iterator[Block]:
        """Each family once. This computes for a while: for another thread, and only one at a time."""
        yield from self._drawing.blocks(*self._shown)
        yield from map(drawn, self._registry.collect())


def catalogue() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and help of all that is ours (`gpumgr_`), by name; a histogram's label `le` goes without saying."""
    families = Metrics(node="", version="", process=False).families
    return sorted((family.name, family.kind, family.labels, family.about) for family in families)


class _CallMeter:
    """Outcomes and durations of one RPC. All series stand from the start, so that a first refusal shows as an increase."""

    def __init__(self, name: str, rpc: str, make: Instruments) -> None:
        requests = make.counter(f"{name}_requests_total", f"{rpc} calls of the kubelet's.", "resource", "outcome")
        seconds = make.histogram(
            f"{name}_duration_seconds", f"How long {rpc} took, refusals included.", "resource", buckets=_CALL_BUCKETS
        )
        self._requests = {(k, outcome): requests.labels(RESOURCE_OF[k], outcome) for k in KINDS for outcome in OUTCOMES}
        self._seconds = {kind: seconds.labels(RESOURCE_OF[kind]) for kind in KINDS}

    def count(self, kind: Kind, outcome: str, seconds: float) -> None:
        self._requests[kind, outcome if outcome in OUTCOMES else "internal"].inc()
        self._seconds[kind].observe(seconds)
