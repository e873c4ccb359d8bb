"""The pods that filter has rejected, and how those of them that fit by now are tried again.

kube-scheduler tries rejected pods again at each event of a pod or a node. Its watch may show an event before the watch of this process
does: then the pod is rejected again, from the old state. And some changes are no events for it: another quota, an assumed placement that
ends. Such a pod would wait for the next event, or for five minutes. An update of any pod that has a node is an event, so the leader updates
an annotation of its own pod.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NoReturn

import structlog

from gpumgr.cluster.index import ClusterIndex
from gpumgr.cluster.quota import NamespaceQuota, Quotas, rank_within_quota
from gpumgr.cluster.request import Policy
from gpumgr.cluster.shape import Rejection
from gpumgr.kubeapi.client import API_FAILURES, ApiServer
from gpumgr.scheduler.objects import WatchedPod
from gpumgr.scheduler.watches import ClusterWatches

_log = structlog.get_logger(__name__)

RETRIED_ANNOTATION: Final = "gpumgr.io/waiting-pods-retried"
#: kube-scheduler has this time to try a pod again by itself, twice as much the next time, and so on: kube-scheduler's own filters may
#: reject a pod that fits here.
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 64.0
#: Different requests that one look examines, those of the highest priority first.
_MAX_REQUESTS: Final = 48


@dataclass(slots=True)
class _Rejected:
    """`names`: the nodes that kube-scheduler offered. `state`: that of the index and the quotas in which the pod did not fit."""

    pod: WatchedPod
    policy: Policy
    names: Sequence[str]
    state: tuple[int, Mapping[str, NamespaceQuota]]
    due: float
    pause_seconds: float = _FIRST_PAUSE_SECONDS


class Rejections:
    """`clock` is monotonic, in seconds."""

    def __init__(
        self, index: ClusterIndex, quotas: Quotas, watches: ClusterWatches, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index, self._quotas, self._watches, self._clock = index, quotas, watches, clock
        self._pods: dict[str, _Rejected] = {}

    def add(self, pod: WatchedPod, policy: Policy, names: Sequence[str]) -> None:
        if len(self._pods) > 2 * len(self._watches.pending) + _MAX_REQUESTS:
            self._pods = {uid: each for uid, each in self._pods.items() if uid in self._watches.pending}
        self._pods.pop(pod.uid, None)
        self._pods[pod.uid] = _Rejected(pod, policy, names, self._state, self._clock() + _FIRST_PAUSE_SECONDS)

    def remove(self, uid: str) -> None:
        self._pods.pop(uid, None)

    def names(self, uid: str) -> Sequence[str]:
        """The nodes that were offered for a rejected pod."""
        found = self._pods.get(uid)
        return found.names if found is not None else ()

    @property
    def _state(self) -> tuple[int, Mapping[str, NamespaceQuota]]:
        return self._index.version, self._quotas.limits

    async def fitting(self) -> WatchedPod | None:
        """A waiting pod that fits by now, and that kube-scheduler has not tried again for a while."""
        now = self._clock()
        seen: set[tuple[object, ...]] = set()
        waiting = [each for uid, each in self._pods.items() if each.due <= now and uid in self._watches.pending]
        for each in sorted(waiting, key=lambda each: -each.pod.priority):
            if each.state == self._state:
                continue
            request = each.pod.request.without_cpu
            key = (each.pod.namespace, request, each.policy, id(each.names))
            if key not in seen:
                if len(seen) == _MAX_REQUESTS:
                    break
                seen.add(key)
                await asyncio.sleep(0)
                found = rank_within_quota(self._index, self._quotas, each.pod.namespace, request, each.policy, each.names)
                if not isinstance(found, Rejection):
                    each.due, each.pause_seconds = now + each.pause_seconds, min(2 * each.pause_seconds, _LONGEST_PAUSE_SECONDS)
                    return each.pod
            each.state = self._state
        return None


async def retry_waiting_pods(
    server: ApiServer, retryable: Callable[[], Awaitable[WatchedPod | None]], own_pod: str, *, period_seconds: float = 1.0
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
            if (text := f"{type(error).__name__}: {error}") != logged:
                logged = text
                _log.warning("waiting_pods_not_retried", error=text, consequence="kube-scheduler tries them at the next event")
