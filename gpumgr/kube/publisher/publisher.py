"""Publishes desired state and events to the API server, from one queue.

Invariants:
1. No caller waits. The number of objects bounds the queue; events beyond a capacity are dropped and counted.
2. The latest state of an object is written before any event. There are two exceptions: after a failed write, and deletions of pods.
3. After an outage or error of the API server all writes wait, in growing, jittered pauses or for its Retry-After. A failed write that
   reached the API server also has growing pauses of its own. Writes with fewer failures come first.
4. A refusal that a retry can't change is logged with its remedy, and the write is dropped; only the deletion of a pod is retried.
"""

import asyncio
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, NoReturn

import aiohttp
import structlog

from gpumgr.agent.node_report import ApiQueueState
from gpumgr.agent.ports import Eviction
from gpumgr.common.aio import LogPace
from gpumgr.kube.client import API_FAILURES, MAX_RETRY_AFTER_SECONDS, AnswerError, ApiServer, failure_text
from gpumgr.kube.publisher.desired import RESYNC_SECONDS, Desired, TokenBucket, WorkQueue
from gpumgr.kube.publisher.events import Event, EventRecorder
from gpumgr.kube.publisher.objects import (
    Condition,
    NodeAnnotations,
    NodeCondition,
    NodeLabels,
    PodAnnotations,
    PodDeletion,
    PodEviction,
)
from gpumgr.placement.pods import PodKey

_log = structlog.get_logger(__name__)

CAPACITY: Final = 512
#: The limit of requests, and half of the largest burst: the kubelet's defaults (kubeAPIQPS 50, kubeAPIBurst 100).
_REQUESTS_PER_SECOND: Final = 50.0
#: The first and the longest pause of all writes after a failure.
_PAUSES_SECONDS: Final = (0.5, 30.0)
#: The first and the longest pause of the write that failed.
_WRITE_PAUSES_SECONDS: Final = (2.0, 60.0)
#: Statuses below 500 after which a retry may succeed. After a 401 the next request reads the credentials again.
_RETRIED: Final = frozenset({401, 408, 409, 429})
#: After this many conflicts (409) another pod has the name.
_MAX_CONFLICTS: Final = 5
#: After these errors no write reaches the API server, so the failed write has no pause of its own.
_UNREACHABLE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
#: How often the queue is checked for new writes while failed writes wait for a retry.
_POLL_SECONDS: Final = 0.25
#: The API server's words, with status 403, for a write to a namespace that is being deleted.
_TERMINATING: Final = "because it is being terminated"
_NODE: Final = ("annotations", "labels", "condition")


class _DeliveryLog:
    """Counts and logs the results of writes. `written`: (what was written, "ok" or "refused") -> number. `dropped` counts events. The start
    and the end of an outage are one line each."""

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node = node
        self._paces: defaultdict[tuple[str, int], LogPace] = defaultdict(lambda: LogPace(clock))
        self.written: Counter[tuple[str, str]] = Counter()
        self.dropped = 0
        self.away = False

    def failed(self, error: Exception) -> None:
        if not self.away:
            self.away = True
            _log.warning("announcements_wait", error=failure_text(error))

    def answered(self, waiting: int) -> None:
        """`waiting`: how many writes are left."""
        if self.away:
            self.away = False
            _log.info("announcements_go_on", waiting=waiting, dropped=self.dropped)

    def count(self, desired: Desired, outcome: str) -> None:
        self.written["node" if desired.what in _NODE else desired.what, outcome] += 1

    def refused(self, desired: Desired, error: AnswerError) -> str:
        """Counts a refusal that a retry can't change. Logs it unless the namespace is being deleted. Returns the remedy."""
        remedy = "nothing; it is tried again" if desired.insists else "nothing; it is not tried again"
        if error.status == 403:
            remedy = f"allow it in the agent's ClusterRole: {desired.rights}"
        elif error.status == 404 and desired.what in _NODE:
            remedy = f"there is no node {self._node}: set node.name to the name that `kubectl get nodes` shows"
        self.count(desired, "refused")
        if _TERMINATING not in str(error) and self._paces[desired.rights, error.status].due():
            _log.warning("announcement_refused", what=desired.what, error=str(error), remedy=remedy)
        return remedy

    def drop(self, waiting: int, because: str) -> None:
        self.dropped += 1
        if self._paces[because, 0].due():
            _log.warning("announcements_dropped", waiting=waiting, because=because)


class Publisher:
    """Writes while `run` runs. All other methods are for the event loop and return at once."""

    def __init__(
        self,
        server: ApiServer,
        node: str,
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._server, self._node = server, node
        self._clock, self._wall, self._sleep, self._jitter = clock, wall, sleep, jitter
        self._queue = WorkQueue(capacity)
        self._bucket = TokenBucket(_REQUESTS_PER_SECOND, round(2 * _REQUESTS_PER_SECOND), clock())
        self._recorder, self._log = EventRecorder(), _DeliveryLog(node, clock)
        self._annotations, self._labels = NodeAnnotations(), NodeLabels()
        self._condition = NodeCondition(wall=wall)
        self._pods: dict[str, PodAnnotations] = {}
        self._deletions: dict[str, PodDeletion] = {}
        self._evictions: dict[str, PodEviction] = {}
        self._eviction_retries = 0
        self._refused_evictions: dict[str, tuple[Eviction, str]] = {}
        self._changed = asyncio.Event()

    def state(self) -> ApiQueueState:
        return ApiQueueState(
            waiting=len(self._queue),
            oldest_seconds=self._queue.oldest_seconds(self._clock()),
            dropped=self._log.dropped,
            written=dict(self._log.written),
            away=self._log.away,
            eviction_retries=self._eviction_retries,
        )

    # -- desired state -----------------------------------------------------------------------------------------------------

    def annotate(self, key: str, value: str) -> None:
        """Sets an annotation of the node. Calls of `annotate`, `label` and `set_condition` may be repeated: an unchanged state is written
        again only after the resync interval."""
        if self._annotations.set({**(self._annotations.value or {}), key: value}, self._clock()):
            self._put(self._annotations)

    def label(self, labels: Mapping[str, str]) -> None:
        """Sets the agent's labels of the node, and removes all other labels that the agent has written."""
        if self._labels.set(labels, self._clock()):
            self._put(self._labels)

    def set_condition(self, condition: Condition | None) -> None:
        """None removes the node's condition."""
        if self._condition.set(condition, self._clock()):
            self._put(self._condition)

    def remove_annotation(self, key: str) -> None:
        """Removes an annotation of the node once. It is not kept away, because another program may set it again at any time."""
        self._annotations.removed.add(key)
        self._put(self._annotations)

    def record(self, event: Event) -> None:
        """Equal events share an object (gpumgr.kube.publisher.events)."""
        series = self._recorder.record(event, self._clock(), self._wall())
        if series is None:
            self._log.drop(len(self._queue), "more events about one object than the spam filter allows")
        else:
            self._put(series)

    def annotate_pod(self, pod: PodKey, uid: str, values: Mapping[str, str | None]) -> None:
        """Sets annotations of the pod with this UID; None removes one. Replaces values that are not written yet."""
        desired = self._pods.setdefault(uid, PodAnnotations(pod, uid))
        desired.values = dict(values)
        self._put(desired)

    def delete_pod(self, pod: PodKey, uid: str) -> None:
        """Deletes the pod with this UID; retries until it is gone."""
        self._put(self._deletions.setdefault(uid, PodDeletion(pod, uid)))

    def forget_pod(self, uid: str) -> None:
        """Call it when the pod is deleted. Cancels all writes to it, even if a requester still lists it for eviction."""
        for gone in filter(None, (self._pods.pop(uid, None), self._deletions.pop(uid, None))):
            self._queue.remove(gone)
        if (eviction := self._evictions.get(uid)) is not None:
            self._queue.remove(eviction)
            eviction.wanted_at = math.inf

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:
        """Replaces the requester's evictions. Each pod is evicted as soon as its PodDisruptionBudget allows it. A refused eviction is
        requested again by a call after the resync interval, or by any call with `immediately`."""
        now, wanted = self._clock(), {each.uid: each for each in evictions}
        for uid, eviction in wanted.items():
            desired = self._evictions.setdefault(uid, PodEviction(eviction.pod, uid))
            if now - desired.wanted_at >= (0.0 if immediately else RESYNC_SECONDS):
                desired.wanted_at = now
                self._put(desired)
            desired.reasons[requester] = eviction.reason
        for uid, desired in list(self._evictions.items()):
            if uid in wanted or (reason := desired.reasons.pop(requester, None)) is None or desired.reasons:
                continue
            del self._evictions[uid]
            if self._queue.remove(desired):
                _log.info("eviction_cancelled", pod_uid=uid, was_because=reason)

    def take_refused_evictions(self) -> Iterable[tuple[Eviction, str]]:
        """Evictions that the API server has refused since the last call, with the reason."""
        refused, self._refused_evictions = self._refused_evictions, {}
        return refused.values()

    def _put(self, desired: Desired) -> None:
        if self._queue.put(desired, self._clock()) is not None:
            self._log.drop(len(self._queue), "events arise faster than the API server accepts them")
        self._changed.set()

    # -- writing -----------------------------------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        shortest, longest = _PAUSES_SECONDS
        pause = shortest
        while True:
            wanted = await self._attempt(await self._next())
            if wanted is None:
                pause = shortest
                continue
            await self._sleep(max(wanted, pause * self._spread()))
            pause = min(pause * 2, longest)

    async def _next(self) -> Desired:
        """The next write, once it is due and the rate allows a request. It is chosen after the wait, because a write can be cancelled
        during the wait."""
        while True:
            now = self._clock()
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
            elif (seconds := self._queue.next_due() - now) > 0:
                await self._sleep(min(seconds, _POLL_SECONDS))
            elif (seconds := self._bucket.take(now)) > 0:
                await self._sleep(seconds)
            elif (desired := self._queue.next(now)) is not None:
                return desired

    async def _attempt(self, desired: Desired) -> float | None:
        """Returns None if the next write may follow at once; otherwise the seconds of the API server's Retry-After, or 0."""
        self._eviction_retries += desired.what == "eviction" and desired.requests > 0
        desired.requests += 1
        try:
            await desired.write(self._server, self._node)
        except API_FAILURES as error:
            return self._failed(desired, error)
        except Exception:  # a bug, which the supervisor logs; the other writes continue
            self._try_later(desired)
            raise
        self._log.count(desired, "ok")
        self._queue.done(desired)
        self._log.answered(len(self._queue))
        return None

    def _failed(self, desired: Desired, error: Exception) -> float | None:
        """Decides whether and when a failed write is retried. Returns what `_attempt` returns."""
        status, wanted = 0, 0.0
        if isinstance(error, AnswerError):
            status, wanted = error.status, min(error.retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
            lasts = status == 409 and desired.attempts >= _MAX_CONFLICTS - 1
            if desired.insists if status >= 500 else lasts or status not in _RETRIED:
                self._refused(desired, error)
                return None
        # In these cases only this write waits, because the cause may concern only this object: a webhook for a deletion, a
        # PodDisruptionBudget for an eviction (429), another writer for a conflict (409).
        alone = desired.insists or status == 409 or (status == 429 and desired.what == "eviction")
        if alone and status in (409, 429):
            self._log.answered(len(self._queue))
        else:
            self._log.failed(error)
        if isinstance(error, _UNREACHABLE) and not alone:
            desired.attempts += 1
        else:
            self._try_later(desired, wanted, held=alone)
        return None if alone else wanted

    def _refused(self, desired: Desired, error: AnswerError) -> None:
        remedy = self._log.refused(desired, error)
        if isinstance(desired, PodEviction) and desired.reasons:  # else it was cancelled during the request
            why = f"{error}; {remedy}" if error.status == 403 else str(error)
            self._refused_evictions[desired.uid] = desired.eviction, why
        if desired.insists:
            self._try_later(desired, held=True)
        else:
            self._queue.done(desired)
        if error.status < 500:
            self._log.answered(len(self._queue))

    def _try_later(self, desired: Desired, wanted: float = 0.0, *, held: bool = False) -> None:
        """Retries the write after its own pause, or after `wanted` seconds. `held`: see `WorkQueue.retry`."""
        shortest, longest = _WRITE_PAUSES_SECONDS
        pause = min(shortest * 2.0 ** min(desired.attempts, 16), longest) * self._spread()
        self._queue.retry(desired, self._clock() + max(wanted, pause), held=held)

    def _spread(self) -> float:
        return 0.8 + 0.4 * self._jitter()
