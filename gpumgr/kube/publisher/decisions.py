"""Publishes decisions: writes the ledger as annotations of pods, and the entries of the history as events.

Invariants:
1. A listener of the history only stores what it needs (`_on_entry`), since a kubelet's call may be waiting. `report` does the rest.
2. A pod is reported once the kubelet's calls for it have been answered: one patch and one event cover all its containers and resources.
3. An error in this module is a bug; it is logged, and neither ends the agent nor fails the caller.
4. Annotations follow the ledger: if an allocation got another pod or was adopted, or was not written before a restart, its annotations are
   written later. They are written only once the API server has listed the pod, since only its UID distinguishes it from another pod of the
   same name.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn

from gpumgr.agent.pods import find_pod
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import BugLog, next_tick, wait_at_most
from gpumgr.kube.cache import PodCache
from gpumgr.kube.hami_formats import MIG_ALLOCATIONS
from gpumgr.kube.pod_annotations import ALLOCATIONS, is_ours, pod_annotations, with_driver_ids
from gpumgr.kube.publisher import event_texts
from gpumgr.kube.publisher.events import Event, ObjectRef, pod_ref
from gpumgr.kube.publisher.hami import HamiBindings
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.history import NOT_ENFORCED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.suspension import SuspensionsById
from gpumgr.placement.pods import PodKey, PodView

#: How long after a call its pod is reported: the kubelet's calls for one pod arrive within milliseconds of each other.
SETTLE_SECONDS: Final = 0.3
REPORT_SECONDS: Final = 1.0
#: How often the annotations of all pods are compared with what the API server has.
CHECK_SECONDS: Final = 600.0
#: An entry waits at most this long until the API server lists its pod.
LATE_SECONDS: Final = 60.0
#: At most this many entries wait.
MAX_LATE: Final = 128
#: Reason of the event of a pod that the API server refuses to evict.
NOT_EVICTED: Final = "GpuPodNotEvicted"


class DecisionReporter:
    """Receives entries of the history from its construction on; `run` is a daemon. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        agent_state: AgentState,
        pods: PodCache,
        node: str,
        annotate_pods: bool = True,
        write_events: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher, self._agent_state, self._pods, self._node = publisher, agent_state, pods, node
        self._annotate_pods, self._write_events, self._clock = annotate_pods, write_events, clock
        self._granted = asyncio.Event()
        self._seen = Ledger()
        self._suspensions: SuspensionsById = {}
        #: Allocation -> when its pod is to be reported.
        self._due: dict[AllocationId, float] = {}
        #: Pods that lost an allocation when the ledger corrected the allocation's pod.
        self._renamed: set[PodKey] = set()
        #: Allocations without an event of their placement.
        self._unreported: set[AllocationId] = set()
        self._evaluators: dict[AllocationId, str] = {}
        #: UID -> annotations that were published, but that the pod cache may not have yet.
        self._published: dict[str, Mapping[str, str]] = {}
        self._late: deque[tuple[float, HistoryEntry]] = deque()
        self._next_check = clock() + CHECK_SECONDS
        self._next_report = clock()
        self._bugs = BugLog("decision_reporter", clock=clock)
        self._hami = HamiBindings(publisher, agent_state=agent_state, pods=pods)
        for entry in agent_state.history.entries():
            self._keep_evaluator(entry)
        agent_state.history.subscribe(self._guarded(self._on_entry))
        pods.subscribe(self._guarded(self._pod_changed))

    def _guarded(self, listener: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            try:
                listener(*arguments)
            except Exception as error:
                self._bugs.record(error)

        return call

    def switch(self, *, annotate_pods: bool, write_events: bool) -> None:
        """Sets what is published from now on; missing annotations are written with the next report."""
        if annotate_pods and not self._annotate_pods:
            self._next_check = self._clock()
        self._annotate_pods, self._write_events = annotate_pods, write_events

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        while True:
            self.report()
            self._granted.clear()
            now = self._clock()
            self._next_report = min([next_tick(REPORT_SECONDS, now), *(due for due in self._due.values() if due > now)])
            await wait_at_most(self._granted, self._next_report - now)

    # -- listeners ---------------------------------------------------------------------------------------------------------

    def _on_entry(self, entry: HistoryEntry) -> None:
        self._keep_evaluator(entry)
        match entry.what:
            case "granted" if entry.id:
                self._hami.decided(entry)
                due = self._due[entry.id] = self._clock() + SETTLE_SECONDS
                self._unreported.add(entry.id)
                if due < self._next_report:
                    self._granted.set()
            case "refused" | "event":
                if entry.call in ("prefer", "allocate"):  # the kubelet rejects the pod
                    self._hami.decided(entry)
                    self._unreported -= {a.id for a in self._agent_state.ledger.of(entry.pod, entry.pod_uid)}
                if entry.code != NOT_ENFORCED:  # the event of the placement reports it
                    self._report_entry(entry)
            case "gpu":
                self._record(event_texts.gpu_event(self._node, entry, self._agent_state.node().label))
            case "config":
                self._record(event_texts.config_event(self._node, entry))

    def _keep_evaluator(self, entry: HistoryEntry) -> None:
        """Stores the allocation's evaluator, because only the entry of a container's first call names it."""
        if entry.what == "granted" and entry.id and entry.evaluator:
            self._evaluators.setdefault(entry.id, entry.evaluator)
        elif entry.what == "freed" and entry.id:
            self._evaluators.pop(entry.id, None)

    def _pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        self._hami.pod_changed(before, after)
        if before is not None and after is None:
            self._published.pop(before.uid, None)
            self._publisher.forget_pod(before.uid)

    # -- reports -----------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Publishes what is new. A call is cheap if nothing is new."""
        now = self._clock()
        for eviction, why in self._publisher.take_refused_evictions():
            message = f"the pod is not evicted ({eviction.reason}): {why}"
            entry = HistoryEntry(what="event", code=NOT_EVICTED, pod=eviction.pod, pod_uid=eviction.uid, why=message)
            self._agent_state.history.add_unless_repeated(entry)
        self._follow_ledger(now)
        if self._due or self._renamed:
            self._settle(now)
        for _ in range(len(self._late)):
            until, entry = self._late.popleft()
            if not self._publish_entry(entry):
                self._keep_late(until, entry) if now < until else self._publisher.count_dropped()

    def _follow_ledger(self, now: float) -> None:
        ledger, before = self._agent_state.ledger, self._seen.allocations
        suspensions, former = self._agent_state.suspensions, self._suspensions
        self._suspensions = suspensions
        changed = [name for name in suspensions.keys() | former.keys() if suspensions.get(name) != former.get(name)]
        self._due |= {name: now for name in changed if name in ledger.allocations}
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._published.clear()
            before = {}
        elif ledger is self._seen:
            return
        self._seen = ledger
        self._hami.ledger_changed()
        for a in ledger.allocations.values():
            known = before.get(a.id)
            if known is a:
                continue
            self._due.setdefault(a.id, now + SETTLE_SECONDS)
            if known is not None and known.pod not in (None, a.pod):
                self._renamed.add(known.pod)

    def _settle(self, now: float) -> None:
        """Reports each pod once all its allocations are due and the driver lists all its GPUs."""
        ledger = self._agent_state.ledger
        shown = self._agent_state.inventory.gpus(ledger.gpu_registry)
        for gone in [each for each in self._due if each not in ledger.allocations]:
            del self._due[gone]
            self._unreported.discard(gone)
        pods: defaultdict[str, list[Allocation]] = defaultdict(list)
        for a in ledger.allocations.values():
            if (view := find_pod(self._pods, a.pod, a.uid)) is not None:
                pods[view.uid].append(a)
        for uid, allocations in pods.items():
            dues = [self._due[a.id] for a in allocations if a.id in self._due]
            if dues and max(dues) <= now and all(gpu in shown for a in allocations for gpu in a.gpus):
                self._report_pod(uid, allocations)
        while self._renamed:
            view = self._pods.get(self._renamed.pop())
            if view is not None and view.uid not in pods and not view.ended:
                self._annotate(view, {})

    def _report_pod(self, uid: str, allocations: list[Allocation]) -> None:
        """Nothing is published for a failed pod, such as one with a refused container: it holds nothing."""
        gpu_registry = self._agent_state.ledger.gpu_registry
        allocations = [a for a in allocations if not a.reserved]
        fresh = [a for a in allocations if a.id in self._unreported]
        for a in allocations:
            self._due.pop(a.id, None)
            self._unreported.discard(a.id)
        view = self._pods.by_uid(uid)
        if view is None or view.phase == "Failed":
            return
        gpus = self._agent_state.inventory.gpus(gpu_registry)
        wanted = pod_annotations(
            view,
            allocations,
            gpu_registry,
            gpus,
            node=self._node,
            evaluators=self._evaluators,
            suspensions=self._agent_state.suspensions,
        )
        self._annotate(view, {**wanted, **self._for_hami(view, allocations)})
        if fresh:
            self._record(event_texts.placement(_ref(view), fresh, self._agent_state.node().label))

    def _for_hami(self, view: PodView, allocations: Iterable[Allocation]) -> Mapping[str, str]:
        """HAMi's annotation of the pod's MIG devices, completed with the driver's ids; empty if the scheduler has not written it."""
        registry, text = self._agent_state.ledger.gpu_registry, self._pods.annotations(view.uid).get(MIG_ALLOCATIONS)
        if text is None:
            return {}
        devices = [(registry.by_name[device.gpu].uuid, device) for a in allocations for device in a.mig_devices]
        with contextlib.suppress(ValueError):
            text = with_driver_ids(text, devices)
        return {MIG_ALLOCATIONS: text}

    def _annotate(self, view: PodView, wanted: Mapping[str, str]) -> None:
        """Publishes the annotations if any differs from what the pod has. Keys are removed only if the agent wrote them, since a scheduler
        writes some of the same keys."""
        present = self._published.get(view.uid) or self._pods.annotations(view.uid)
        gone = [key for key in present if key not in wanted and is_ours(key)] if ALLOCATIONS in present else []
        if self._annotate_pods and (gone or any(present.get(key) != value for key, value in wanted.items())):
            self._published[view.uid] = wanted
            self._publisher.annotate_pod(view.key, view.uid, {**dict.fromkeys(gone), **wanted})

    # -- events of pods ----------------------------------------------------------------------------------------------------

    def _record(self, event: Event) -> None:
        if self._write_events:
            self._publisher.record(event)

    def _report_entry(self, entry: HistoryEntry) -> None:
        if self._write_events and not self._publish_entry(entry):
            self._keep_late(self._clock() + LATE_SECONDS, entry)

    def _keep_late(self, until: float, entry: HistoryEntry) -> None:
        if len(self._late) >= MAX_LATE:
            self._late.popleft()
            self._publisher.count_dropped()
        self._late.append((until, entry))

    def _publish_entry(self, entry: HistoryEntry) -> bool:
        """Publishes the entry as an event of its pod. False: the pod is not known yet."""
        allocation = self._agent_state.ledger.allocations.get(entry.id) if entry.id else None
        pod = entry.pod or (allocation.pod if allocation else None)
        uid = entry.pod_uid or (allocation.uid if allocation else None)
        if pod is None and uid is None:
            return entry.what == "refused"  # its pod will never be known; the kubelet's own event has the reason
        if (view := find_pod(self._pods, pod, uid)) is not None:
            about = _ref(view)
        elif pod is not None and uid is not None:
            about = pod_ref(pod, uid)
        else:
            return False
        self._record((event_texts.refusal if entry.what == "refused" else event_texts.pod_event)(about, entry))
        return True


def _ref(view: PodView) -> ObjectRef:
    """`kubectl describe` searches for a static pod's events by the UID that the kubelet gave the pod."""
    return pod_ref(view.key, view.runtime_uid or view.uid)
