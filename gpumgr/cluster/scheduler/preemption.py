"""kube-scheduler's call preempt, and GPUs that are kept for the pods that preempt.

kube-scheduler evicts the victims and nominates their node for the pod (status.nominatedNodeName). Until the pod is bound, other pods of the
same or a lower priority must not take the GPUs. So the GPUs are assumed for the pod while the victims still hold them.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import structlog

from gpumgr.cluster.core.choose import Misfit, NodeChoice
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import placed_pod
from gpumgr.cluster.core.node import NodeState, Used
from gpumgr.cluster.core.quota import added_holdings
from gpumgr.cluster.core.request import PlacedPod
from gpumgr.cluster.core.victims import Cost, Eviction, Preemptor, find_eviction
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.cluster.scheduler.wire import PreemptResult, Victims
from gpumgr.settings.schema import SchedulerSettings

_log = structlog.get_logger(__name__)

#: A call examines at most _MAX_NODES nodes. The work of a node is its number of GPUs times its number of pods; once the sum over the
#: examined nodes has reached _MAX_WORK, no further node is examined. 8 GPUs with 80 pods take 20 ms, 64 GPUs with 640 pods up to 1 s.
_MAX_NODES: Final = 32
_MAX_WORK: Final = 20_480
#: A node as it was examined. A NodeChoice names GPUs by their positions in this NodeState.
_NodeView = tuple[NodeState | None, Mapping[str, PlacedPod]]


@dataclass
class _Kept:
    """GPUs that are kept for a pod. `nominated`: kube-scheduler has accepted the node."""

    pod: PlacedPod
    until: float
    nominated: bool = False


class Preemption:
    """Finds victims, and keeps GPUs for the pods that preempt. `kept`: by the UID of the pod. `clock` is monotonic, in seconds."""

    def __init__(self, watches: ClusterWatches, settings: SchedulerSettings, *, clock: Callable[[], float]) -> None:
        self._watches, self._settings, self._clock = watches, settings, clock
        self._index, self._quotas = watches.index, watches.quotas
        self.kept: dict[str, _Kept] = {}
        #: UIDs of nominated pods that have been examined, because GPUs are kept only once for each nomination.
        self._seen: set[str] = set()
        self._keeping = asyncio.Lock()

    # -- kept GPUs ---------------------------------------------------------------------------------------------------------

    async def keep_nominated(self) -> None:
        """Keeps GPUs for newly nominated pods. Each verb (call of kube-scheduler) awaits this first. A node that changes while a thread
        examines it is examined again before the next verb."""
        async with self._keeping:
            self.refresh()
            nominated = self._watches.nominated
            self._seen &= nominated.keys()
            for uid, pod in [item for item in nominated.items() if item[0] not in self._seen]:
                name = str(pod.nominated)
                there, eviction = self._node_view(name), None
                if self._index.placement(uid) is None:
                    eviction = await asyncio.to_thread(self._examination(pod, name))
                if nominated.get(uid) is not pod or self._node_view(name) != there:
                    continue
                self._seen.add(uid)
                if eviction is not None and self._index.placement(uid) is None:
                    until = self._clock() + self._settings.nomination_seconds
                    self._keep(placed_pod(pod, self._index.node(name), eviction.choice), until, nominated=True)

    def refresh(self) -> None:
        """Stops keeping GPUs for pods that were placed, have lost their nomination, or have waited too long. Once kube-scheduler nominates
        the node, the wait begins anew."""
        nominated, now = self._watches.nominated, self._clock()
        for uid, kept in list(self.kept.items()):
            pod = nominated.get(uid)
            if uid not in self._index.assumed:
                del self.kept[uid]
            elif kept.until <= now:
                self.release(uid)
            elif pod is not None and pod.nominated == kept.pod.node:
                if not kept.nominated:
                    kept.nominated = True
                    self._keep(kept.pod, now + self._settings.nomination_seconds, nominated=True)
            elif pod is not None or kept.nominated:
                self.release(uid)
                self._seen.discard(uid)

    def release(self, uid: str) -> None:
        self.kept.pop(uid, None)
        self._index.remove(uid)

    def restore(self, uid: str) -> None:
        """Assumes the kept GPUs again, for example after filter has rejected the pod because its victims have not ended."""
        if (kept := self.kept.get(uid)) is not None:
            self._index.assume(kept.pod)

    def placed(self, pod: PlacedPod) -> None:
        """Stops keeping GPUs for this pod, which has its place now, and for pods of lower priority that no longer fit beside it."""
        self.kept.pop(pod.uid, None)
        for uid in self._lower(pod.priority):
            if self.kept[uid].pod.node == pod.node and not self._index.fits(self.kept[uid].pod):
                self.release(uid)

    @contextmanager
    def without_lower(self, priority: int) -> Iterator[bool]:
        """Within this context nothing is kept for pods of lower priority. Yields whether anything was kept for them."""
        lower = self._lower(priority)
        for uid in lower:
            self._index.remove(uid)
        try:
            yield bool(lower)
        finally:
            for uid in lower:
                self.restore(uid)

    def _lower(self, priority: int) -> list[str]:
        return [uid for uid, kept in self.kept.items() if kept.pod.priority < priority and uid in self._index.assumed]

    def _keep(self, pod: PlacedPod, until: float, *, nominated: bool = False) -> None:
        self.kept[pod.uid] = _Kept(pod, until, nominated)
        self._index.assume(pod)

    # -- the verb ----------------------------------------------------------------------------------------------------------

    async def preempt(
        self, pod: WatchedPod, proposed: Mapping[str, tuple[frozenset[str], int]], rejected: Sequence[str]
    ) -> PreemptResult:
        """Proposes at most one node, so that it is clear which GPUs are to be kept. `proposed`: node -> the UIDs of kube-scheduler's
        victims, and their violations of PodDisruptionBudgets. `rejected`: nodes that filter has rejected; they have passed kube-scheduler's
        own filters. A node that changes while a thread examines it is not taken."""
        found: list[tuple[int, Cost, int, str, Eviction, _NodeView]] = []
        for name in self._nodes_to_examine(pod, proposed, rejected):
            uids, violations = proposed.get(name, (frozenset(), 0))
            there = self._node_view(name)
            eviction = await asyncio.to_thread(self._examination(pod, name, uids))
            if eviction is not None and eviction.victims:
                # Violations of PodDisruptionBudgets are known only for the victims that kube-scheduler proposes.
                found.append((violations, eviction.cost, len(eviction.victims - uids), name, eviction, there))
        bound = self._index.placement(pod.uid) is not None and pod.uid not in self._index.assumed
        for violations, _, _, name, eviction, there in sorted(found, key=lambda each: each[:-2]):
            if not bound and self._node_view(name) == there:
                until = self._clock() + self._settings.assume_seconds
                self._keep(placed_pod(pod, self._index.node(name), eviction.choice), until)
                uids = eviction.victims
                _log.info("preemption", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid, node=name, victims=sorted(uids))
                return PreemptResult({name: Victims([{"UID": uid} for uid in sorted(uids)], violations)})
        return PreemptResult()

    def _node_view(self, name: str) -> _NodeView:
        return self._index.node(name), dict(self._index.pods_on(name))

    def _nodes_to_examine(
        self, pod: WatchedPod, proposed: Mapping[str, tuple[Set[str], int]], rejected: Sequence[str]
    ) -> list[str]:
        """The most promising nodes with pods of a lower priority."""
        lowest = {
            name: min((each.priority for each in self._index.pods_on(name).values()), default=pod.priority)
            for name in {*proposed, *rejected}
        }
        helpful = [name for name, priority in lowest.items() if priority < pod.priority]
        none: tuple[Set[str], int] = (frozenset(), 0)
        ordered = sorted(helpful, key=lambda name: (proposed.get(name, none)[1], lowest[name], name))[:_MAX_NODES]
        gpus = (len(node.gpus) if (node := self._index.node(name)) else 0 for name in ordered)
        work = accumulate((each * len(self._index.pods_on(name)) for name, each in zip(ordered, gpus, strict=True)), initial=0)
        return [name for name, before in zip(ordered, work, strict=False) if before < _MAX_WORK]

    def _examination(self, pod: WatchedPod, name: str, proposed: frozenset[str] = frozenset()) -> Callable[[], Eviction | None]:
        """Returns a function for a thread. The function finds the victims on the node as it is now, without the GPUs that are kept for the
        pod itself. If the quota of the pod's namespace is too small for the pod, only pods of this namespace can be victims, because only
        they free quota."""
        node = self._index.node(name)
        if node is None:
            return lambda: None
        pods = {uid: each for uid, each in self._index.pods_on(name).items() if uid != pod.uid}
        policy, quotas = pod.policy or self._settings.policy, self._quotas.without(pod.namespace, pod.uid)
        unbound = frozenset(uid for uid in pods if uid in self._index.assumed)
        ending = frozenset(self._watches.ending & pods.keys())
        find = partial(find_eviction, node, pods, unbound=unbound, ending=ending, proposed=proposed)
        holdings = {uid: self._quotas.held(uid) for uid in pods}
        own = frozenset(uid for uid, (namespace, _) in holdings.items() if namespace == pod.namespace)

        def chosen(freed: Set[str], used: Used, uids: Set[str]) -> NodeChoice | Misfit | Rejection:
            held = added_holdings(holdings[uid][1] for uid in uids & freed)
            return quotas.choose(pod.namespace, node, used, pod.request, policy, held)

        # The first search counts only the quota that ending and unbound pods free; the second also the quota that victims free.
        first = Preemptor(pod.request, pod.priority, partial(chosen, own & (ending | unbound)))
        second = Preemptor(pod.request, pod.priority, partial(chosen, own), own)
        limited = pod.namespace in quotas.limits
        return lambda: find(first) or (find(second) if limited else None)
