"""Publishes desired state and events to the API server, from one queue.

Invariants:
1. No caller waits: a call changes the desired state of an object and queues it. Memory is bounded by the objects that exist and, for
   events, by a capacity; what is dropped is counted.
2. The latest desired state of an object is written before any event.
3. Outages and errors of the API server are retried with growing, jittered pauses, or after its Retry-After. An answer that no retry
   changes is logged with its remedy, and the job is given up until its state changes or is repeated after the resync interval.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import structlog

from gpumgr.agent.drain_evictions import Eviction
from gpumgr.agent.node_report import ApiQueueState
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer
from gpumgr.kube.publisher.events import Event, EventRecorder, EventSeries
from gpumgr.kube.publisher.evictions import PodEvictions
from gpumgr.kube.publisher.node_status import NodeStatus
from gpumgr.kube.publisher.work_queue import Job, TokenBucket, What, WorkQueue
from gpumgr.ledger.pods import PodKey

_log = structlog.get_logger(__name__)

#: Events that may wait.
CAPACITY: Final = 512
#: Statuses below 500 that a retry may change. 401: the next request reads the credentials again.
_RETRIED: Final = frozenset({401, 408, 409, 429})
#: A conflict that lasts means that another incarnation of the pod has the name.
_MAX_CONFLICTS: Final = 5
_OF_NODE: Final = frozenset[What]({"annotations", "labels", "condition"})
#: A job that failed waits longer than the queue does, so that the others come first.
_JOB_FACTOR: Final = 4.0
#: While jobs wait for their time, new ones are noticed within this time.
_POLL_SECONDS: Final = 0.25
#: The longest pause of all writes that an API server can request by Retry-After.
_LONGEST_PAUSE_SECONDS: Final = 120.0

#: Refusals of the same kind, and dropped events, are logged once in this time.
_LOG_AGAIN_SECONDS: Final = 3600.0
#: The RBAC rules that each kind of job needs.
RIGHTS: Final[dict[What, str]] = {
    "event": "create and patch on events",
    "eviction": "create on pods/eviction",
    "pod": "patch on pods",
    "annotations": "patch on nodes",
    "labels": "get and patch on nodes",
    "condition": "get on nodes and patch on nodes/status",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """`per_second` is the limit of requests, with twice as many at once: the kubelet's own defaults (kubeAPIQPS 50, kubeAPIBurst 100).

    `retry_seconds`: the first and the longest pause after failures. `resync_seconds`: how often unchanged state of the node is compared
    and its condition's heartbeat written, and the longest Retry-After that is kept to.
    """

    per_second: float = 50.0
    retry_seconds: tuple[float, float] = (0.5, 30.0)
    resync_seconds: float = 600.0


class DeliveryLog:
    """`written` counts by what was written ("pod", "event", "node", "eviction") and outcome ("ok", "refused"), `dropped` counts events.

    The start and the end of an outage are one line each. `clock` is monotonic, in seconds.
    """

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node, self._clock = node, clock
        self._logged: dict[tuple[str, int], float] = {}
        self.written: Counter[tuple[str, str]] = Counter()
        self.dropped = 0
        self.away = False

    def failed(self, error: str) -> None:
        """The API server does not answer, or answers with an error of its own."""
        if not self.away:
            self.away = True
            _log.warning("announcements_wait", error=error)

    def answered(self, waiting: int) -> None:
        """The API server answers; `waiting` jobs are left."""
        if self.away:
            self.away = False
            _log.info("announcements_go_on", waiting=waiting, dropped=self.dropped)

    def count(self, job: Job, outcome: str) -> None:
        self.written[job.what if job.what in ("pod", "event", "eviction") else "node", outcome] += 1

    def refused(self, job: Job, error: AnswerError) -> None:
        """A refusal that no retry changes; logged with its remedy, once an hour for each kind."""
        self.count(job, "refused")
        if "NamespaceTerminating" not in error.causes and self._is_new(job.what, error.status):
            _log.warning("announcement_refused", what=job.what, error=str(error), remedy=self._remedy(job.what, error.status))

    def drop(self, waiting: int, because: str) -> None:
        """An event is dropped; logged once an hour for each reason."""
        self.dropped += 1
        if self._is_new(because, 0):
            _log.warning("announcements_dropped", waiting=waiting, because=because)

    def _is_new(self, what: str, status: int) -> bool:
        """False if the same was logged within the last hour."""
        now, before = self._clock(), self._logged.get((what, status))
        if before is not None and now - before < _LOG_AGAIN_SECONDS:
            return False
        self._logged[what, status] = now
        return True

    def _remedy(self, what: What, status: int) -> str:
        if status == 403:
            return f"allow it in the agent's ClusterRole: {RIGHTS[what]}"
        if status == 404 and what in ("annotations", "labels", "condition"):
            return f"there is no node {self._node}: set node.name to the name that `kubectl get nodes` shows"
        return "nothing; it is not tried again"


class Publisher:
    """Writes while `run` runs. All methods are for the event loop and return at once. `clock` is monotonic, `wall` unix seconds."""

    def __init__(
        self,
        server: ApiServer,
        node: str,
        *,
        rates: Rates = Rates(),
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._server, self._node_name, self._rates = server, node, rates
        self._clock, self._wall, self._sleep, self._jitter = clock, wall, sleep, jitter
        self._queue = WorkQueue(capacity)
        self._bucket = TokenBucket(rates.per_second, round(2 * rates.per_second), clock())
        self._recorder, self._log = EventRecorder(), DeliveryLog(node, clock)
        resync = rates.resync_seconds
        #: The desired state of the Node object.
        self.node = NodeStatus(server, node, self._put, resync_seconds=resync, clock=clock, wall=wall)
        self._evictions = PodEvictions(server, self._queue, resync_seconds=resync, clock=clock)
        self._pods: dict[str, tuple[PodKey, Mapping[str, str | None]]] = {}
        self._refused_evictions: dict[str, tuple[Eviction, str]] = {}
        self._changed = asyncio.Event()
        self._writers: Mapping[What, Callable[[Any], Awaitable[None]]] = {
            "annotations": self.node.write_annotations,
            "labels": self.node.write_labels,
            "condition": self.node.write_condition,
            "eviction": self._evictions.write,
            "pod": self._write_pod,
            "event": self._write_event,
        }

    def state(self) -> ApiQueueState:
        return ApiQueueState(
            waiting=len(self._queue),
            oldest_seconds=self._queue.oldest_seconds(self._clock()),
            dropped=self._log.dropped,
            written=dict(self._log.written),
            away=self._log.away,
            eviction_retries=self._evictions.retries,
        )

    # -- desired state -----------------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Publishes an event; equal and similar ones share an object (gpumgr.kube.publisher.events)."""
        now = self._clock()
        series = self._recorder.record(event, now, self._wall())
        if series is None:
            self._log.drop(len(self._queue), "more events about one object than the spam filter allows")
        else:
            self._put(Job("event", series), now)

    def annotate_pod(self, pod: PodKey, uid: str, values: Mapping[str, str | None]) -> None:
        """Sets annotations of this incarnation of the pod; None removes one. Replaces what is not written yet."""
        self._pods[uid] = pod, dict(values)
        self._put(Job("pod", uid), self._clock())

    def forget_pod(self, uid: str) -> None:
        """The pod is deleted: nothing is written to it any more."""
        self._pods.pop(uid, None)
        self._queue.remove(Job("pod", uid))
        self._evictions.gone(uid)

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:
        """Replaces the evictions of the requester. Each pod is evicted as soon as its PodDisruptionBudget allows it. A refused request is
        repeated by a call after the resync interval, or by any call with `immediately`."""
        self._evictions.set(requester, evictions, immediately=immediately)
        self._changed.set()

    def take_refused_evictions(self) -> Iterable[tuple[Eviction, str]]:
        """Evictions that the API server has refused since the last call, each with the reason."""
        refused, self._refused_evictions = self._refused_evictions, {}
        return refused.values()

    def count_dropped(self) -> None:
        """An event was dropped before it came here, because its pod is unknown."""
        self._log.dropped += 1

    def _put(self, job: Job, due: float) -> None:
        if self._queue.put(job, due) is not None:
            self._log.drop(len(self._queue), "events arise faster than the API server accepts them")
        self._changed.set()

    # -- writing -----------------------------------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        pause, longest = self._rates.retry_seconds
        while True:
            wanted = await self._attempt(await self._next_job())
            if wanted is None:
                pause = self._rates.retry_seconds[0]
                continue
            await self._sleep(max(wanted, pause * self._spread()))
            pause = min(pause * 2, longest)

    async def flush(self, seconds: float) -> None:
        """Writes what is due, until a request fails or the time has passed; to be called after `run` has ended. The node's own state is
        not written: the next agent may have written a newer one already. Removals (`NodeStatus.remove_once`) are, as they would be lost."""
        try:
            async with asyncio.timeout(seconds):
                while (job := self._queue.next(self._clock())) is not None:
                    if job.what in _OF_NODE and not (job.what == "annotations" and self.node.keep_removals()):
                        self._queue.remove(job)
                    elif await self._attempt(job) is not None:
                        return
        except TimeoutError:
            _log.info("announcements_left", waiting=len(self._queue))
        except Exception as error:  # a bug must not turn an orderly stop into a failure
            _log.error("daemon_failed", daemon="publisher", error=repr(error), exc_info=error)

    async def _next_job(self) -> Job:
        """The next job, as soon as it is due and the rate allows its request. It is chosen last: until then it may be cancelled."""
        while True:
            now = self._clock()
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
            elif (seconds := self._queue.next_due() - now) > 0:
                await self._sleep(min(seconds, _POLL_SECONDS))
            elif (seconds := self._bucket.take(now)) > 0:
                await self._sleep(seconds)
            elif (job := self._queue.next(now)) is not None:
                return job

    async def _attempt(self, job: Job) -> float | None:
        """Writes one object. None: continue with the next one; else a failure, with the seconds to wait that the API server requests."""
        try:
            await self._writers[job.what](job.subject)
            self._log.count(job, "ok")
        except AnswerError as error:
            conflict = error.status == 409
            if (error.status in _RETRIED or error.status >= 500) and not (
                conflict and self._queue.attempts(job) >= _MAX_CONFLICTS - 1
            ):
                return self._retry(job, error)
            self._refuse(job, error)
        except API_FAILURES as error:
            self._log.failed(f"{type(error).__name__}: {error}")
            return 0.0
        except Exception:  # a bug: the other jobs go on without this one, and the supervisor logs it
            self._queue.retry(job, self._clock() + self._backoff(job))
            raise
        self._queue.done(job)
        self._answered()
        return None

    def _retry(self, job: Job, error: AnswerError) -> float | None:
        wanted = min(error.retry_after_seconds, _LONGEST_PAUSE_SECONDS)
        budget = job.what == "eviction" and error.status == 429
        self._queue.retry(job, self._clock() + max(wanted, self._backoff(job)), held=budget)
        if budget or error.status == 409:
            self._answered()  # a PodDisruptionBudget, or another writer: the API server works
            return None
        self._log.failed(str(error))
        return wanted

    def _refuse(self, job: Job, error: AnswerError) -> None:
        self._log.refused(job, error)
        if job.what == "eviction" and (eviction := self._evictions.eviction(str(job.subject))) is not None:
            remedy = f"; allow it in the agent's ClusterRole: {RIGHTS['eviction']}" if error.status == 403 else ""
            self._refused_evictions[eviction.uid] = eviction, f"{error}{remedy}"

    async def _write_pod(self, uid: str) -> None:
        """404: the pod is gone. With the UID in the patch, the API server refuses it (409) for another pod of the name."""
        (namespace, name), values = self._pods[uid]
        patch = {"metadata": {"uid": uid, "annotations": values}}
        await self._server.send("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}", patch, but=(404,))

    async def _write_event(self, series: EventSeries) -> None:
        """404: the API server has removed the event, which it does after an hour. 409: an earlier request created it, but its
        response was lost; the count may have been smaller."""
        path = f"{series.path}/{series.name}"
        if series.created and await self._server.send("PATCH", path, series.patch(), but=(404,)):
            return
        if not await self._server.send("POST", series.path, series.body(self._node_name), but=(409,)):
            await self._server.send("PATCH", path, series.patch(), but=(404,))
        series.created = True

    def _backoff(self, job: Job) -> float:
        """Seconds until a failed job is retried."""
        shortest, longest = self._rates.retry_seconds
        doublings: int = min(self._queue.attempts(job), 16)
        return min(_JOB_FACTOR * shortest * float(2**doublings), 2 * longest) * self._spread()

    def _answered(self) -> None:
        self._log.answered(len(self._queue))

    def _spread(self) -> float:
        return 0.8 + 0.4 * self._jitter()
