"""The pods that filter has rejected. kube-scheduler is made to try them again when they fit.

kube-scheduler tries rejected pods again at each event of a pod or a node, otherwise after five minutes. That is not enough: if
kube-scheduler receives an event before this process does, the pod is rejected by the old state; and a changed quota or the end of an
assumed placement is no event. An update of any pod that has a node is an event, so the leader updates an annotation of its own pod.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from datetime import UTC, datetime
from typing import Final, NoReturn

import msgspec
import structlog

from gpumgr.cluster.core.question import Largest, Question
from gpumgr.cluster.core.request import PlacedPod, Policy
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.aio import LogPace, in_slices, sliced
from gpumgr.kube.client import API_FAILURES, ApiServer, failure_text

_log = structlog.get_logger(__name__)

RETRIED_ANNOTATION: Final = "gpumgr.io/waiting-pods-retried"
#: The pause before a retry, so that kube-scheduler can try the pod by itself. It doubles with each retry, because kube-scheduler's own
#: filters may reject a pod that fits here.
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 64.0
#: A call of `Rejections.fitting` stops after this time, and the next call continues there.
_LOOK_SECONDS: Final = 0.4
#: If more rejected pods are kept than this number plus twice the number of waiting pods, the ones that no longer wait are dropped.
_REMEMBERED: Final = 100


class _Rejected(msgspec.Struct):
    """A pod that did not fit when the index had `version` and its quota had the state `quota`. `offered`: the nodes that kube-scheduler
    offered, as bits by `numbering`. `due`: when the pod may be tried again. `retried_for`: the kept placement that caused the last
    retry."""

    pod: WatchedPod
    policy: Policy
    offered: int
    numbering: int
    version: int
    quota: Hashable
    due: float
    pause_seconds: float
    retried_for: PlacedPod | None = None

    def retried(self, now: float, kept: PlacedPod | None = None) -> None:
        """Notes a retry at `now`: the next one is due after the pause. `kept`: the kept placement that causes the retry."""
        self.retried_for, self.due = kept, now + self.pause_seconds
        self.pause_seconds = min(2 * self.pause_seconds, _LONGEST_PAUSE_SECONDS)


class Rejections:
    """`pods`: the rejected pods, by UID. `clock` is monotonic, in seconds."""

    def __init__(self, watches: ClusterWatches, *, clock: Callable[[], float]) -> None:
        self._watches, self._clock = watches, clock
        self._index, self._quotas = watches.index, watches.quotas
        self.pods: dict[str, _Rejected] = {}

    def add(self, pod: WatchedPod, policy: Policy, offered: int) -> None:
        if len(self.pods) > 2 * len(self._watches.pending) + _REMEMBERED:
            self.pods = {uid: each for uid, each in self.pods.items() if uid in self._watches.pending}
        before, kept, pause = self.pods.get(pod.uid), self._index.placement(pod.uid), _FIRST_PAUSE_SECONDS
        if before is None or before.retried_for != kept:
            kept = None
        elif kept is not None:  # the kept GPUs are free, but the pod's quota or kube-scheduler's own filters exclude them
            pause = before.pause_seconds
        due, state = self._clock() + pause, self._quotas.state(pod.namespace)
        self.pods[pod.uid] = _Rejected(
            pod, policy, offered, self._index.numbering, self._index.version, state, due, pause, retried_for=kept
        )

    def names(self, uid: str) -> Sequence[str]:
        """The nodes that were offered for a rejected pod; none if the nodes were renumbered since."""
        found = self.pods.get(uid)
        return self._index.names(found.offered) if found is not None and found.numbering == self._index.numbering else ()

    async def fitting(self) -> WatchedPod | None:
        """A waiting pod that fits by now and is due for a retry."""
        now, version, numbering = self._clock(), self._index.version, self._index.numbering
        waiting = [each for uid, each in self.pods.items() if each.due <= now and uid in self._watches.pending]
        waiting.sort(key=lambda each: (each.version, -each.pod.priority))
        #: Most pods were offered the same nodes, so what is free there is computed once for all of them.
        seen, rooms = set[Hashable](), dict[tuple[int, int], tuple[int, Largest]]()
        began = time.perf_counter()
        async for each in sliced(waiting):
            if self.pods.get(each.pod.uid) is not each:
                continue
            # GPUs that are kept for a pod that preempts count as used, so the search below would not find them, even for this pod.
            if (kept := self._index.placement(each.pod.uid)) is not None and self._index.fits(kept):
                each.retried(now, kept)
                return each.pod
            quota = self._quotas.state(each.pod.namespace)
            offered = each.offered if each.numbering == numbering else -1  # -1: all nodes, since the offered ones were renumbered
            known = offered, each.version if quota == each.quota else -1
            if known not in rooms:
                nodes = offered & self._index.changed_since(known[1])
                rooms[known] = nodes, Largest.on(self._index, nodes)
            nodes, largest = rooms[known]
            if nodes and largest.may_fit(each.pod.request):
                key = (quota is not None and each.pod.namespace, each.pod.request.without_cpu, each.policy, nodes)
                if key not in seen and await self._fits(each, nodes):
                    each.retried(now)
                    return each.pod
                seen.add(key)
            if self._index.numbering != numbering:
                break
            each.version, each.quota = version, quota
            if time.perf_counter() > began + _LOOK_SECONDS:
                break
        return None

    async def _fits(self, each: _Rejected, nodes: int) -> bool:
        question = Question(self._index, each.pod.request.without_cpu, each.policy, each.pod.namespace)
        await in_slices(question.examine(nodes, reasons=False))
        return question.fits(nodes)


async def retry_waiting_pods(
    server: ApiServer, retryable: Callable[[], Awaitable[WatchedPod | None]], own_pod: str, *, period_seconds: float = 0.5
) -> NoReturn:
    """Makes kube-scheduler try rejected pods again once one of them fits. Run it as a daemon. `own_pod`: the API path of this process's
    pod. One pod at a time is enough, because its binding is the event for the next one."""
    failures = LogPace()
    while True:
        await asyncio.sleep(period_seconds)
        if (pod := await retryable()) is None:
            continue
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            await server.send("PATCH", own_pod, {"metadata": {"annotations": {RETRIED_ANNOTATION: now}}})
            _log.info("waiting_pods_retried", pod=f"{pod.namespace}/{pod.name}", pod_uid=pod.uid)
        except API_FAILURES as error:
            if failures.due():
                consequence = "kube-scheduler tries them at the next event"
                _log.warning("waiting_pods_not_retried", error=failure_text(error), consequence=consequence)
