"""A drain's side of evictions: who on the GPU is asked to go, who can't be, and what is taken back when the GPU is."""

from typing import Any, Protocol

import structlog

from gpumgr.agent.books import Books
from gpumgr.agent.cordons import Cordon
from gpumgr.agent.occupants import pod_of, shown_pod_of
from gpumgr.agent.ports import Pods
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import Card
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodKey

log = structlog.get_logger(__name__)

#: Code of a pod's entry in the history.
EVICTED = "GpuDrained"


class Announcer(Protocol):
    """Asks the API server, without waiting for it (gpumgr.kubeapi.writer.announcer.Announcer)."""

    def evict(self, pod: PodKey, uid: str, *, reason: str) -> None: ...

    def cancel_evict(self, uid: str, *, reason: str | None = None) -> None:
        """This life of a pod need not go for this reason any more."""
        ...


class Evictions:
    """Remembers for each GPU what it asked for, so that nothing else is taken back: a pod may have to go for other reasons, too."""

    def __init__(self, *, books: Books, pods: Pods, announcer: Announcer) -> None:
        self._books, self._pods, self._announcer = books, pods, announcer
        #: UUID of a GPU -> (UID of a pod, reason), each once and in order.
        self._asked: dict[str, dict[tuple[str, str], None]] = {}

    def ask(self, card: Card, cordon: Cordon, *, again: bool = False) -> dict[str, Any]:
        """Each pod once. `not_evicted` tells who stays, and why. `again`: the history has it already."""
        label = self._books.node().label(card.name)
        reason = f"{label} is drained" + (f": {cordon.reason}" if cordon.reason else "")
        pods: dict[tuple[PodKey, str], Allocation] = {}
        staying = []
        for holder in self._books.ledger.on(card.name):
            view, name = shown_pod_of(holder, self._pods), pod_of(holder, self._pods)
            if view is not None and view.runtime_uid is not None:
                staying.append(f"{holder.describe()}: it is a static pod, which ends with its manifest on the node only")
            elif name is not None:
                pods.setdefault(name, holder)
            else:
                staying.append(f"{holder.describe()}: nobody knows which pod it is")
        for (pod, uid), holder in pods.items():
            self._asked.setdefault(card.uuid, {})[uid, reason] = None
            self._announcer.evict(pod, uid, reason=reason)
            log.info("gpu_drain_evicts", allocation=holder.id, pod="/".join(pod), pod_uid=uid, reason=reason)
            if not again:
                self._tell(pod, uid, holder, reason)
        return {"evicting": ["/".join(pod) for pod, _ in pods], "not_evicted": staying}

    def cancel(self, card: Card) -> None:
        """The GPU is given back: whoever has not gone may stay."""
        for uid, reason in self._asked.pop(card.uuid, {}):
            self._announcer.cancel_evict(uid, reason=reason)

    def _tell(self, pod: PodKey, uid: str, holder: Allocation, why: str) -> None:
        history = self._books.history
        history.add(
            Entry(
                at=history.now(),
                what="event",
                code=EVICTED,
                id=holder.id,
                pod=pod,
                pod_uid=uid,
                container=holder.container,
                gpus=holder.gpus,
                why=f"the pod is evicted: {why}",
            )
        )
