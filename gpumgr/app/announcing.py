"""Carries what happened here to the API server: the history's entries as events, the ledger as annotations of pods.

Rule 1. The decision's path only leaves a word here (`hear`); all else happens in `look`, a moment later.
Rule 2. A pod is told once its calls have been answered: its containers and both resources together are one patch and one event.
Rule 3. A bug in here must not end the agent, nor fail what it is told of: whoever calls us hears nothing of it, the log does. `look` lets
        it through to who runs us, and what it stumbled over is not looked at a second time.
Rule 4. Annotations follow the ledger, not the news: what is renamed, adopted, or was not written before a restart, is written then.
        A pod that the API server has not shown yet waits, since only its UID tells it from another of the same name.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, Protocol

from gpumgr.agent.books import Books
from gpumgr.agent.ports import Pods
from gpumgr.aio import Bugs
from gpumgr.allocator.annotations import ALLOCATIONS, pod_annotations
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Allocation, AllocationId, Ledger
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.kubeapi.writer import telling
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.kubeapi.writer.notices import Subject, pod_subject

#: The kubelet's calls for one pod come within milliseconds of each other.
SETTLE_SECONDS: Final = 0.3
LOOK_SECONDS: Final = 1.0
#: How often all pods' annotations are compared with what the API server has.
CHECK_SECONDS: Final = 600.0
#: How long, and how many at most, wait for the API server to show their pod.
LATE_SECONDS: Final = 60.0
MAX_LATE: Final = 128


class ShownPods(Pods, Protocol):
    """The pods with what we wrote there (gpumgr.kubeapi.cache.PodCache)."""

    def annotations(self, uid: str) -> Mapping[str, str]: ...

    def subscribe(self, listener: Callable[[PodView | None, PodView | None], None]) -> None: ...


class Announcing:
    """Made once, where there is an API server; listens from then on. `run` it as a daemon.

    `describe` tells what the node shows of itself, once a second (gpumgr.app.describing). `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        announcer: Announcer,
        *,
        books: Books,
        pods: ShownPods,
        describe: Callable[[], None],
        node: str,
        annotate_pods: bool = True,
        write_events: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcer, self._books, self._pods, self._describe, self._node = announcer, books, pods, describe, node
        self._annotate_pods, self._write_events, self._clock = annotate_pods, write_events, clock
        self._news = asyncio.Event()
        self._seen = Ledger()
        #: Allocations whose pod is to be looked at, and when.
        self._due: dict[AllocationId, float] = {}
        self._renamed: set[PodKey] = set()
        self._untold: set[AllocationId] = set()
        self._evaluators: dict[AllocationId, str] = {}
        self._written: dict[str, Mapping[str, str]] = {}
        self._late: deque[tuple[float, Entry]] = deque()
        self._next_check = clock() + CHECK_SECONDS
        self._next_description = clock()
        self._looks_at = clock()
        self._bugs = Bugs("announcing", clock=clock)
        for entry in books.history.entries():
            self._remember(entry)
        books.history.subscribe(self.hear)
        pods.subscribe(self._pod_changed)

    def switch(self, *, annotate_pods: bool, write_events: bool) -> None:
        """What is written, from now on; annotations that were not written until now are with the next look."""
        if annotate_pods and not self._annotate_pods:
            self._next_check = self._clock()
        self._annotate_pods, self._write_events = annotate_pods, write_events

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            self.look()
            self._news.clear()
            now = self._clock()
            self._looks_at = min(
                (due for due in self._due.values() if now < due < now + LOOK_SECONDS), default=now + LOOK_SECONDS
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._looks_at - now):
                    await self._news.wait()

    # -- what is heard -----------------------------------------------------------------------------------------------------

    def hear(self, entry: Entry) -> None:
        """An entry of the history; a decision may be waiting for us to return."""
        try:
            self._hear(entry)
        except Exception as error:
            self._bugs.tell(error)

    def _hear(self, entry: Entry) -> None:
        self._remember(entry)
        match entry.what:
            case "granted" if entry.id:
                due = self._due[entry.id] = self._clock() + SETTLE_SECONDS
                self._untold.add(entry.id)
                if due < self._looks_at:
                    self._news.set()
            case "refused" | "event":
                if entry.call in ("prefer", "allocate"):
                    self._untold -= {a.id for a in self._books.ledger.of(entry.pod, entry.pod_uid)}  # the kubelet fails the pod
                if entry.code != telling.NOT_ENFORCED:  # the event of the placement says it
                    self._tell_pod_news(entry)
            case "gpu":
                if self._write_events:
                    self._announcer.event(telling.gpu_news(self._node, entry, self._books.node().label))
            case "config":
                if self._write_events:
                    self._announcer.event(telling.config_news(self._node, entry))

    def _remember(self, entry: Entry) -> None:
        """The evaluator stands in the entry of the container's first call only."""
        if entry.what == "granted" and entry.id and entry.evaluator:
            self._evaluators.setdefault(entry.id, entry.evaluator)
        elif entry.what == "freed" and entry.id:
            self._evaluators.pop(entry.id, None)

    def _pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        if before is not None and after is None:
            try:
                self._written.pop(before.uid, None)
                self._announcer.forget_pod(before.key, before.uid)
            except Exception as error:
                self._bugs.tell(error)

    # -- once a second, and when pods have settled -------------------------------------------------------------------------

    def look(self) -> None:
        """Says what there is to say; cheap if that is nothing."""
        now = self._clock()
        try:
            self._follow_ledger(now)
            if self._due or self._renamed:
                self._settle(now)
            self._tell_late(now)
        finally:
            if now >= self._next_description:
                self._next_description = now + LOOK_SECONDS
                self._describe()

    def _follow_ledger(self, now: float) -> None:
        ledger, before = self._books.ledger, self._seen.allocations
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._written.clear()
            before = {}
        elif ledger is self._seen:
            return
        self._seen = ledger
        for a in ledger.allocations.values():
            known = before.get(a.id)
            if known is a:
                continue
            self._due.setdefault(a.id, now + SETTLE_SECONDS)
            if known is not None and known.pod not in (None, a.pod):
                self._renamed.add(known.pod)

    def _settle(self, now: float) -> None:
        """Writes of the pods of whom all is said that is to be said now."""
        ledger = self._books.ledger
        shown = self._books.inventory.gpus(ledger.cards)
        for gone in [each for each in self._due if each not in ledger.allocations]:
            del self._due[gone]
            self._untold.discard(gone)
        pods: defaultdict[str, list[Allocation]] = defaultdict(list)
        for a in ledger.allocations.values():
            if (view := self._view_of(a)) is not None:
                pods[view.uid].append(a)
        for uid, allocations in pods.items():
            dues = [self._due[a.id] for a in allocations if a.id in self._due]
            if dues and max(dues) <= now and all(gpu in shown for a in allocations for gpu in a.gpus):
                self._tell(uid, allocations)
        while self._renamed:
            view = self._pods.get(self._renamed.pop())
            if view is not None and view.uid not in pods and not view.ended:
                self._annotate(view, {})

    def _tell(self, uid: str, allocations: list[Allocation]) -> None:
        """A pod that failed, as one does with a container that was refused, has nothing any more."""
        cards = self._books.ledger.cards
        fresh = [a for a in allocations if a.id in self._untold]
        for a in allocations:
            self._due.pop(a.id, None)
            self._untold.discard(a.id)
        view = self._pods.by_uid(uid)
        if view is None or view.phase == "Failed":
            return
        if self._annotate_pods:
            gpus = self._books.inventory.gpus(cards)
            self._annotate(view, pod_annotations(view, allocations, cards, gpus, node=self._node, evaluators=self._evaluators))
        if fresh and self._write_events:
            self._announcer.event(telling.placement(_subject(view), fresh, cards, self._books.node().label))

    def _annotate(self, view: PodView, wanted: Mapping[str, str]) -> None:
        """Writes all of it unless it is there, or on its way. Taken away is only what we wrote: of the keys that are a scheduler's,
        too, its own stay."""
        there = self._written.get(view.uid) or self._pods.annotations(view.uid)
        gone = [key for key in there if key not in wanted] if ALLOCATIONS in there else []
        if self._annotate_pods and (gone or any(there.get(key) != value for key, value in wanted.items())):
            self._written[view.uid] = wanted
            self._announcer.annotate_pod(view.key, view.uid, {**dict.fromkeys(gone), **wanted})

    def _view_of(self, a: Allocation) -> PodView | None:
        """The allocation's pod, this very life of it."""
        view = self._pods.get(a.pod) if a.pod else self._pods.by_uid(a.uid) if a.uid else None
        return view if view is not None and a.uid in (None, view.uid, view.runtime_uid) else None

    # -- events of pods ----------------------------------------------------------------------------------------------------

    def _tell_pod_news(self, entry: Entry) -> None:
        if not self._write_events or self._tell_named(entry):
            return
        if len(self._late) >= MAX_LATE:
            self._late.popleft()
            self._announcer.lost()
        self._late.append((self._clock() + LATE_SECONDS, entry))

    def _tell_named(self, entry: Entry) -> bool:
        """False: which pod it is about is not known."""
        allocation = self._books.ledger.allocations.get(entry.id) if entry.id else None
        pod = entry.pod or (allocation.pod if allocation else None)
        uid = entry.pod_uid or (allocation.uid if allocation else None)
        if pod is None and uid is None:
            return entry.what == "refused"  # nobody knows whose it is; the kubelet's own event has the sentence
        view = self._pods.get(pod) if pod else self._pods.by_uid(uid or "")
        if view is not None and uid in (None, view.uid, view.runtime_uid):
            about = _subject(view)
        elif pod is not None and uid is not None:
            about = pod_subject(pod, uid)
        else:
            return False
        self._announcer.event((telling.refusal if entry.what == "refused" else telling.pod_news)(about, entry))
        return True

    def _tell_late(self, now: float) -> None:
        for _ in range(len(self._late)):
            until, entry = self._late.popleft()
            if self._tell_named(entry):
                continue
            if now < until:
                self._late.append((until, entry))
            else:
                self._announcer.lost()


def _subject(view: PodView) -> Subject:
    """`kubectl describe` looks for a static pod's events under the kubelet's UID of it."""
    return pod_subject(view.key, view.runtime_uid or view.uid)
