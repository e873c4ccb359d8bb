"""The pods that filter has rejected. kube-scheduler is made to try them again when they fit.

kube-scheduler tries rejected pods again at each event of a pod or a node. Its watch may show an event before the watch of this process
does: then the pod is rejected again, from the old state. And some changes are no events for it: another quota, an assumed placement that
ends. Such a pod would wait for the next event, or for five minutes. An update of any pod that has a node is an event, so the leader updates
an annotation of its own pod.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from operator import or_
from typing import Final, NoReturn

import msgspec
import structlog

from gpumgr.cluster.core.index import Largest, NodeSet
from gpumgr.cluster.core.request import Policy
from gpumgr.cluster.core.shape import Rejection
from gpumgr.cluster.core.within_quota import KeptRejections, RankWithinQuota
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common import aio
from gpumgr.common.aio import in_slices
from gpumgr.kube.client import API_FAILURES, ApiServer, failure_text

_log = structlog.get_logger(__name__)

RETRIED_ANNOTATION: Final = "gpumgr.io/waiting-pods-retried"
#: The pause before a retry, so that kube-scheduler can try the pod by itself. It doubles with each retry: kube-scheduler's own filters
#: may reject a pod that fits here.
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 64.0
#: A look is one call of `Rejections.fitting`. After this time it stops, and the next look goes on from there.
_LOOK_SECONDS: Final = 0.4
#: The number of the last looks for which the changed nodes are kept.
_REMEMBERED: Final = 100


class _Rejected(msgspec.Struct):
    """`offered`: the nodes that kube-scheduler offered. The pod did not fit at the look with number `look`, when its quota had the state
    `quota`."""

    pod: WatchedPod
    policy: Policy
    offered: NodeSet
    look: int
    quota: Hashable
    due: float
    pause_seconds: float = _FIRST_PAUSE_SECONDS


class Rejections:
    """`pods`: the rejected pods, by UID. `clock` is monotonic, in seconds."""

    def __init__(self, watches: ClusterWatches, kept: KeptRejections, *, clock: Callable[[], float]) -> None:
        self._watches, self._kept, self._clock = watches, kept, clock
        self._index, self._quotas = watches.index, watches.quotas
        self.pods: dict[str, _Rejected] = {}
        #: For each of the last looks, the nodes that had changed since the look before it.
        self._changed: deque[NodeSet] = deque(maxlen=_REMEMBERED)
        self._looks = 0

    def add(self, pod: WatchedPod, policy: Policy, offered: NodeSet) -> None:
        if len(self.pods) > 2 * len(self._watches.pending) + _REMEMBERED:
            self.pods = {uid: each for uid, each in self.pods.items() if uid in self._watches.pending}
        due = self._clock() + _FIRST_PAUSE_SECONDS
        self.pods[pod.uid] = _Rejected(pod, policy, offered, self._looks, self._quotas.state(pod.namespace), due)

    def names(self, uid: str) -> Sequence[str]:
        """The nodes that were offered for a rejected pod."""
        found = self.pods.get(uid)
        return self._index.names(found.offered) if found is not None else ()

    async def fitting(self) -> WatchedPod | None:
        """A waiting pod that fits by now, and that kube-scheduler has not tried again for a while; None if there is none."""
        now = self._clock()
        changed = self._index.take_changed()
        if self._changed and self._changed[-1].numbering != changed.numbering:
            self._changed.clear()
        self._changed.append(changed)
        self._looks += 1
        since = [*accumulate((each.nodes for each in reversed(self._changed)), or_)]
        waiting = [each for uid, each in self.pods.items() if each.due <= now and uid in self._watches.pending]
        waiting.sort(key=lambda each: (each.look, -each.pod.priority))
        #: Most pods were offered the same nodes, so what is free on the changed nodes is computed once for all of them.
        seen, rooms = set[Hashable](), dict[tuple[int, int, bool], tuple[NodeSet, Largest]]()
        began = turn = time.perf_counter()
        for each in waiting:
            if self.pods.get(each.pod.uid) is not each:
                continue
            looks, quota = self._looks - each.look, self._quotas.state(each.pod.namespace)
            known = id(each.offered), looks, looks <= len(since) and quota == each.quota
            if known not in rooms:
                nodes = self._index.node_set(each.offered)
                if (
                    nodes.numbering != changed.numbering
                ):  # the nodes were numbered again during this look; the next look uses the new numbers
                    break
                nodes = nodes.within(since[looks - 1]) if known[2] else nodes
                rooms[known] = nodes, self._index.largest(nodes)
            nodes, largest = rooms[known]
            if len(nodes) and largest.may_fit(each.pod.request):
                key = (quota is not None and each.pod.namespace, each.pod.request.without_cpu, each.policy, nodes)
                if key not in seen and await self._fits(each, nodes):
                    each.due, each.pause_seconds = now + each.pause_seconds, min(2 * each.pause_seconds, _LONGEST_PAUSE_SECONDS)
                    return each.pod
                seen.add(key)
            each.look, each.quota = self._looks, quota
            if time.perf_counter() > turn + aio.SLICE_SECONDS:
                await asyncio.sleep(0)
                turn = time.perf_counter()
            if turn > began + _LOOK_SECONDS:
                break
        return None

    async def _fits(self, each: _Rejected, nodes: NodeSet) -> bool:
        request = each.pod.request.without_cpu
        shape = self._index.shape(request, each.policy)
        await in_slices(self._index.examine(shape, nodes, reasons=False))
        fits = self._index.any_fits(shape, nodes)
        if not fits or each.pod.namespace not in self._quotas.limits:
            return fits
        question = RankWithinQuota(self._index, self._quotas, each.pod.namespace, request, each.policy, nodes, kept=self._kept)
        await in_slices(question.examine())
        return not isinstance(question.rank(), Rejection)


async def retry_waiting_pods(
    server: ApiServer, retryable: Callable[[], Awaitable[WatchedPod | None]], own_pod: str, *, period_seconds: float = 0.5
) -> NoReturn:
    """A daemon. `own_pod`: the path of this process's pod. One pod at a time is enough: its binding is an event, too."""
    logged = ""
    while True:
        await asyncio.sleep(period_seconds)
        if (pod := await retryable()) is None:
            continue
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            await server.send("PATCH", own_pod, {"metadata": {"annotations": {RETRIED_ANNOTATION: now}}})
            _log.info("waiting_pods_retried", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid)
            logged = ""
        except API_FAILURES as error:
            if (text := failure_text(error)) != logged:
                logged = text
                _log.warning("waiting_pods_not_retried", error=text, consequence="kube-scheduler tries them at the next event")
