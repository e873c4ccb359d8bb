"""Publishes decisions: the ledger as annotations of pods, and the entries of the history as events.

Invariants:
1. The listeners return at once, because a call of the kubelet may be waiting. `report` does the work, so a bug in it fails no such call.
2. A pod is reported once the kubelet's calls for it have been answered: one patch and one event for all containers and resources.
3. Annotations follow the ledger. They are written once the API server has listed the pod, because only its UID distinguishes it from
   another pod of the same name.
"""

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NoReturn

from gpumgr.agent.pods import find_pod
from gpumgr.agent.state import OPEN_SECONDS, AgentState
from gpumgr.common.aio import next_tick, wait_at_most
from gpumgr.common.units import CORES_PER_GPU, GpuName
from gpumgr.kube.cache import PodCache
from gpumgr.kube.hami_formats import MIG_ALLOCATIONS
from gpumgr.kube.pod_annotations import ALLOCATIONS, is_ours, pod_annotations, with_driver_ids
from gpumgr.kube.publisher.events import Event, ObjectRef, node_ref, pod_ref
from gpumgr.kube.publisher.hami import HamiBindings
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.callers import next_container
from gpumgr.ledger.history import DEMANDED, NOT_ENFORCED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.suspension import SuspensionsById
from gpumgr.placement.pods import PodView

#: How long after a change of an allocation its pod is reported. The kubelet's calls for one pod arrive within milliseconds.
SETTLE_SECONDS: Final = 0.3
REPORT_SECONDS: Final = 1.0
#: How often the annotations of all pods are compared with the ledger.
CHECK_SECONDS: Final = 600.0
NOT_EVICTED: Final = "GpuPodNotEvicted"
PLACED: Final = "GpuPlaced"
REFUSED: Final = "GpuRefused"
#: Mechanisms that enforce nothing (the backends Unlimited and UnlimitedMps).
_UNLIMITED: Final = frozenset({"none", "mps-open"})
#: Codes of the history for which an event about a GPU or the settings file is a warning.
_WARNINGS: Final = frozenset({"lost", "unhealthy", "not_readable", "overcommitted", "rejected"})

Label = Callable[[GpuName], str]


class DecisionReporter:
    """Receives the history's entries from its creation on. `run` is a daemon."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        agent_state: AgentState,
        pods: PodCache,
        node: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher, self._agent_state, self._pods, self._node = publisher, agent_state, pods, node
        self._annotate_pods, self._write_events, self._clock = True, True, clock
        self._entries: deque[HistoryEntry] = deque()
        self._news = asyncio.Event()
        self._seen = Ledger()
        self._suspensions: SuspensionsById = {}
        #: Allocation -> when its pod is to be reported.
        self._due: dict[AllocationId, float] = {}
        #: Allocations without an event of their placement.
        self._unreported: set[AllocationId] = set()
        self._next_check = clock() + CHECK_SECONDS
        self._hami = HamiBindings(publisher, agent_state=agent_state, pods=pods)
        agent_state.history.subscribe(self._added)
        pods.subscribe(self._pod_changed)

    def switch(self, *, annotate_pods: bool, write_events: bool) -> None:
        """Missing annotations are written with the next report."""
        if annotate_pods and not self._annotate_pods:
            self._next_check = self._clock()
        self._annotate_pods, self._write_events = annotate_pods, write_events

    async def run(self) -> NoReturn:
        while True:
            self._news.clear()
            self.report()
            now = self._clock()
            due = min((due for due in self._due.values() if due > now), default=math.inf)
            await wait_at_most(self._news, min(due, next_tick(REPORT_SECONDS, now)) - now)

    # -- listeners ---------------------------------------------------------------------------------------------------------

    def _added(self, entry: HistoryEntry) -> None:
        self._entries.append(entry)
        self._news.set()

    def _pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        if before is not None and after is None:
            self._hami.gone(before)
            self._publisher.forget_pod(before.uid)

    # -- reports -----------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        now = self._clock()
        for eviction, why in self._publisher.take_refused_evictions():
            message = f"the pod is not evicted ({eviction.reason}): {why}"
            entry = HistoryEntry(what="event", code=NOT_EVICTED, pod=eviction.pod, pod_uid=eviction.uid, why=message)
            self._agent_state.history.add_unless_repeated(entry)
        while self._entries:
            self._publish(self._entries.popleft())
        self._follow_ledger(now)
        self._hami.follow()
        if any(due <= now for due in self._due.values()):
            self._settle(now)

    def _follow_ledger(self, now: float) -> None:
        """Makes a report due for each changed allocation. At each check all allocations count as changed."""
        ledger, suspensions = self._agent_state.ledger, self._agent_state.suspensions
        before, former = self._seen.allocations, self._suspensions
        self._seen, self._suspensions = ledger, suspensions
        if now >= self._next_check:
            self._next_check, before = now + CHECK_SECONDS, {}
        for a in ledger.allocations.values():
            if before.get(a.id) is not a or suspensions.get(a.id) != former.get(a.id):
                self._due[a.id] = now + SETTLE_SECONDS

    def _settle(self, now: float) -> None:
        """Reports a pod when all its allocations are due and the driver lists all its GPUs. A Pending pod that lacks devices is reported
        OPEN_SECONDS later, because the kubelet's next call for the pod may still follow (slow disk, busy machine). Clears the annotations
        of active pods without allocations."""
        ledger = self._agent_state.ledger
        shown = self._agent_state.inventory.gpus(ledger.gpu_registry)
        self._due = {each: due for each, due in self._due.items() if each in ledger.allocations}
        self._unreported &= ledger.allocations.keys()
        pods: defaultdict[str, list[Allocation]] = defaultdict(list)
        for a in ledger.allocations.values():
            if (view := find_pod(self._pods, a.pod, a.uid)) is not None:
                pods[view.uid].append(a)
        for view in self._pods.all():
            allocations = pods[view.uid]
            due = max((self._due[a.id] for a in allocations if a.id in self._due), default=math.inf)
            if due <= now and view.phase == "Pending" and next_container(ledger, view) is not None:
                due += OPEN_SECONDS
            if due <= now and all(gpu in shown for a in allocations for gpu in a.gpus):
                self._report_pod(view, allocations)
            elif not (allocations or view.ended or view.deleted) and ALLOCATIONS in self._pods.annotations(view.uid):
                self._annotate(view, {})

    def _report_pod(self, view: PodView, allocations: Sequence[Allocation]) -> None:
        """Publishes nothing for a failed pod, because such a pod holds no GPU."""
        gpu_registry = self._agent_state.ledger.gpu_registry
        allocations = [a for a in allocations if not a.reserved]
        fresh = [a for a in allocations if a.id in self._unreported]
        for a in allocations:
            self._due.pop(a.id, None)
            self._unreported.discard(a.id)
        if view.phase == "Failed":
            return
        wanted = pod_annotations(
            view,
            allocations,
            gpu_registry,
            self._agent_state.inventory.gpus(gpu_registry),
            node=self._node,
            evaluators={each.id: each.evaluator for each in self._agent_state.history.entries() if each.id and each.evaluator},
            suspensions=self._agent_state.suspensions,
        )
        self._annotate(view, {**wanted, **self._for_hami(view, allocations)})
        if fresh:
            self._record(placement(_ref(view), fresh, self._agent_state.node().label))

    def _for_hami(self, view: PodView, allocations: Iterable[Allocation]) -> Mapping[str, str]:
        """HAMi's annotation of the pod's MIG devices with the driver's ids; {} if the scheduler has not written it."""
        registry, text = self._agent_state.ledger.gpu_registry, self._pods.annotations(view.uid).get(MIG_ALLOCATIONS)
        if text is None:
            return {}
        devices = [(registry.by_name[device.gpu].uuid, device) for a in allocations for device in a.mig_devices]
        with contextlib.suppress(ValueError):
            text = with_driver_ids(text, devices)
        return {MIG_ALLOCATIONS: text}

    def _annotate(self, view: PodView, wanted: Mapping[str, str]) -> None:
        """Writes the annotations that differ. Removes keys only from a pod that the agent has annotated, because a scheduler writes some of
        these keys."""
        present = self._pods.annotations(view.uid)
        gone = [key for key in present if key not in wanted and is_ours(key)] if ALLOCATIONS in present else []
        if self._annotate_pods and (gone or any(present.get(key) != value for key, value in wanted.items())):
            self._publisher.annotate_pod(view.key, view.uid, {**dict.fromkeys(gone), **wanted})

    # -- events ------------------------------------------------------------------------------------------------------------

    def _publish(self, entry: HistoryEntry) -> None:
        match entry.what:
            case "granted" if entry.id:
                self._unreported.add(entry.id)
            case "refused" | "event":
                if entry.call in ("prefer", "allocate"):  # the kubelet rejects the pod
                    self._unreported -= {a.id for a in self._agent_state.ledger.of(entry.pod, entry.pod_uid)}
                about = self._about(entry)
                if about is not None and entry.code != NOT_ENFORCED:  # the event of the placement reports NOT_ENFORCED
                    self._record(pod_event(about, entry))
            case "gpu" | "config":
                self._record(node_event(self._node, entry, self._agent_state.node().label))

    def _about(self, entry: HistoryEntry) -> ObjectRef | None:
        """The entry's pod; None if its UID is not known. Then only the kubelet's own event has the reason of a refusal."""
        allocation = self._agent_state.ledger.allocations.get(entry.id) if entry.id else None
        pod = entry.pod or (allocation.pod if allocation else None)
        uid = entry.pod_uid or (allocation.uid if allocation else None)
        if (view := find_pod(self._pods, pod, uid)) is not None:
            return _ref(view)
        return pod_ref(pod, uid) if pod and uid else None

    def _record(self, event: Event) -> None:
        if self._write_events:
            self._publisher.record(event)


def _ref(view: PodView) -> ObjectRef:
    """A static pod's event needs the UID from the kubelet, because `kubectl describe` searches for it."""
    return pod_ref(view.key, view.runtime_uid or view.uid)


def placement(about: ObjectRef, allocations: Sequence[Allocation], label: Label) -> Event:
    """The event about a pod's GPUs, and about containers that run without limits."""
    return Event(
        about=about,
        reason=PLACED,
        message="; ".join([*(_placed(a, label) for a in allocations), *_caution(allocations)]),
        warning=False,
        allocations=tuple(a.id for a in allocations),
    )


def pod_event(about: ObjectRef, entry: HistoryEntry) -> Event:
    """The event for a history entry "refused" or "event": a warning, except for what the pod itself demanded (DEMANDED)."""
    refused = entry.what == "refused"
    return Event(
        about=about,
        reason=REFUSED if refused else entry.code or "GpuNews",
        message=f"container {entry.container}: {entry.why}" if refused and entry.container else entry.why,
        warning=refused or entry.code not in DEMANDED,
        allocations=(entry.id,) if entry.id else (),
    )


def node_event(node: str, entry: HistoryEntry, label: Label) -> Event:
    """The event about a GPU ("GpuLost") or the settings file ("GpumgrConfigReloaded", "GpumgrConfigRejected")."""
    code = entry.code or "news"
    name = "".join(word.capitalize() for word in code.split("_"))
    return Event(
        about=node_ref(node),
        reason=f"GpumgrConfig{name}" if entry.what == "config" else f"Gpu{name}",
        message=": ".join(filter(None, (", ".join(map(label, entry.gpus)), entry.why or code))),
        warning=code in _WARNINGS,
        allocations=(entry.id,) if entry.id else (),
    )


def _placed(a: Allocation, label: Label) -> str:
    name = f"{a.container}: " if a.container else ""
    return name + ", ".join(_parts(a, label)) + (f" ({a.why})" if a.why else "")


def _caution(allocations: Sequence[Allocation]) -> Iterator[str]:
    unlimited = [a for a in allocations if not a.whole and a.mechanisms and _UNLIMITED.issuperset(a.mechanisms)]
    if unlimited:
        names = ", ".join(a.container or "?" for a in unlimited)
        which = f"container {names} within its share" if len(unlimited) == 1 else f"containers {names} within their shares"
        backends = ", ".join(dict.fromkeys(name for a in unlimited for name in a.mechanisms))
        yield f"{NOT_ENFORCED}: nothing on this node keeps {which} (enforcement backend {backends})"
        yield "`gpumgr doctor` on the node says which backends could"


def _parts(a: Allocation, label: Label) -> Iterator[str]:
    yield from map(label, a.gpus)
    if a.whole:
        number = a.cores // CORES_PER_GPU
        yield "whole" if number == 1 else f"{number} whole GPUs"
    elif a.cores:
        yield f"{a.cores} core{'s' if a.cores > 1 else ''}"
    if memory := a.memory_mebibytes:
        yield f"{memory} MiB"
