"""Reports to HAMi's scheduler how the admission of its pods went: removes its lock of the node, and sets the pod's phase.

That scheduler binds the next pod of a node once the lock is gone, or after 5 minutes. The agent needs no lock, so it makes no difference
if the lock is another pod's by now. A pod that the kubelet refuses by itself, or that ends while no agent runs, holds it, too: a pod is
waited for until it has all its devices, has ended, or is gone. The API server is not asked for the lock.
"""

from typing import Final

from gpumgr.agent.pods import find_pod
from gpumgr.agent.state import AgentState
from gpumgr.kube.cache import PodCache
from gpumgr.kube.hami_node import LOCK
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.annotations import HAMI_PHASE
from gpumgr.ledger.callers import next_container
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.pods import PodView

#: Phases of a pod that HAMi's scheduler does not wait for.
_FINAL: Final = ("success", "failed")


class HamiBindings:
    """The phase of a pod that has its devices is one of its annotations in `pod_annotations`."""

    def __init__(self, publisher: Publisher, *, agent_state: AgentState, pods: PodCache) -> None:
        self._publisher, self._agent_state, self._pods = publisher, agent_state, pods
        #: UIDs.
        self._waiting: set[str] = set()

    def decided(self, entry: HistoryEntry) -> None:
        """A call of the kubelet was answered."""
        view = find_pod(self._pods, entry.pod, entry.pod_uid)
        if view is not None and view.bound_by_hami and (entry.what == "refused" or self._has_devices(view)):
            self._end(view, failed=entry.what == "refused")

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """`after` None: it is gone. The phase of a new pod shows whether an earlier process has seen its end."""
        if after is None:
            if before is not None and before.uid in self._waiting:
                self._end(before)
        elif after.bound_by_hami and before is None and self._pods.annotations(after.uid).get(HAMI_PHASE) not in _FINAL:
            self._waiting.add(after.uid)
            self._look(after)
        elif after.uid in self._waiting:
            self._look(after)

    def ledger_changed(self) -> None:
        for view in filter(None, map(self._pods.by_uid, tuple(self._waiting))):
            self._look(view)

    def _look(self, view: PodView) -> None:
        if view.ended or self._has_devices(view):
            self._end(view, failed=view.phase == "Failed")

    def _has_devices(self, view: PodView) -> bool:
        return next_container(self._agent_state.ledger, view) is None

    def _end(self, view: PodView, *, failed: bool = False) -> None:
        self._waiting.discard(view.uid)
        if failed:
            self._publisher.annotate_pod(view.key, view.uid, {HAMI_PHASE: "failed"})
        self._publisher.node.remove_once(LOCK)
