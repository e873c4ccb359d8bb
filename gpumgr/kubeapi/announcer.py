"""One writer of everything that people should see in the API server: events of pods, annotations of the node, evictions.

Law 1. Nobody waits for it: what is said is put into a bounded queue, and an absent API server costs nothing but the oldest events.
Law 2. Of an annotation the latest value is written, of a repeated event the count, once a minute at most.
Law 3. Absence is weather: retried with growing, jittered pauses. A refusal that no retry can change is dropped, and the log says,
       once an hour, which right is missing.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NoReturn

import aiohttp
import structlog

from gpumgr.allocator.pods import PodKey
from gpumgr.errors import SettingsError
from gpumgr.kubeapi.client import AnswerError, ApiServer
from gpumgr.kubeapi.notices import Count, Eviction, Notice
from gpumgr.kubeapi.outbox import Outbox, TokenBucket
from gpumgr.kubeapi.writes import What, Writes, remedy

_log = structlog.get_logger(__name__)

_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, SettingsError)
#: Statuses below 500 that tell of the server's state and not of our request. 401: the credentials are read again.
_RETRIED: Final = frozenset({401, 408, 409, 429})
#: While other jobs wait for their time, new ones are noticed within this time.
_LOOK_SECONDS: Final = 1.0
_TELL_AGAIN_SECONDS: Final = 3600.0

#: The node's annotations are one job.
Job = Notice | Eviction | Literal["annotations"]
_ANNOTATIONS: Final = "annotations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`window_seconds`: equal events are one within this time. `recount_seconds`: how often the count of one is written at most.

    Pauses grow from the first to the longest: `pause_seconds` after any failure, `job_seconds` for the one thing that failed.
    """

    capacity: int = 512
    per_second: float = 5.0
    burst: int = 25
    window_seconds: float = 600.0
    recount_seconds: float = 60.0
    pause_seconds: tuple[float, float] = (0.5, 30.0)
    job_seconds: tuple[float, float] = (2.0, 60.0)
    max_retry_after_seconds: float = 120.0


@dataclass(slots=True, kw_only=True)
class _Series:
    """One notice over its window; it lives as long as its notice waits, at least. `written`: the API server has an Event of it.
    `due`: when it may be written (again)."""

    began: float
    due: float
    count: Count
    written: bool = False


class Announcer:
    """`run` it forever; everything else returns at once. All calls belong into the event loop.

    `clock` is monotonic, `wall` tells unix seconds. `dropped` counts what was lost for want of room.
    """

    def __init__(
        self,
        server: ApiServer,
        node: str,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._server, self._node, self._writes = server, node, Writes(server, node)
        self._pace = pace or Pace()
        self._clock, self._wall, self._sleep, self._jitter = clock, wall, sleep, jitter
        self._outbox: Outbox[Job] = Outbox(self._pace.capacity, rank=_rank)
        self._bucket = TokenBucket(per_second=self._pace.per_second, burst=self._pace.burst, now=clock())
        self._series: dict[Notice, _Series] = {}
        self._annotations: dict[str, str | None] = {}
        self._news = asyncio.Event()
        self._away = self._told_of_drops = self._renewed = False
        self._told_of_refusal: dict[tuple[What, int], float] = {}
        self.dropped = 0

    # -- what others say ---------------------------------------------------------------------------------------------------

    def pod_event(self, pod: PodKey, uid: str, *, reason: str, message: str, warning: bool) -> None:
        """An Event for `kubectl describe pod`. `reason` is one CamelCase word; a long message is cut."""
        notice = Notice(pod=pod, uid=uid, reason=reason, message=message, warning=warning)
        now, wall = self._clock(), self._wall()
        series = self._series.get(notice)
        if series is None or (notice not in self._outbox and self._is_over(series, now)):
            self._forget_series(now)
            series = self._series[notice] = _Series(began=now, due=now, count=Count(count=0, first_at=wall, last_at=wall))
        series.count = Count(count=series.count.count + 1, first_at=series.count.first_at, last_at=wall)
        self._put(notice, series.due)

    def annotate_node(self, key: str, value: str | None) -> None:
        """Sets an annotation of this node; None takes it away."""
        self._annotations[key] = value
        self._put(_ANNOTATIONS, self._clock())

    def evict(self, pod: PodKey, uid: str, *, reason: str) -> None:
        """Evicts this life of the pod, as soon as its PodDisruptionBudget lets it go. `reason` is told in the log."""
        self._put(Eviction(pod=pod, uid=uid, reason=reason), self._clock())

    def _put(self, job: Job, due: float) -> None:
        lost = self._outbox.put(job, due)
        self._news.set()
        if lost is None:
            return
        self.dropped += 1
        if isinstance(lost, Notice) and not self._series[lost].written:
            del self._series[lost]
        if not self._told_of_drops:
            self._told_of_drops = True
            _log.warning("announcements_dropped", waiting=len(self._outbox), because="more is said than the API server takes")

    def _is_over(self, series: _Series, now: float) -> bool:
        return now - series.began >= self._pace.window_seconds

    def _forget_series(self, now: float) -> None:
        """Makes room: what is over goes, and of what is written the oldest, if it is more than twice what may wait."""
        idle = {notice: series for notice, series in self._series.items() if notice not in self._outbox}
        too_many = max(0, len(self._series) - 2 * self._pace.capacity)
        for notice in [*islice(idle, too_many), *(notice for notice, series in idle.items() if self._is_over(series, now))]:
            self._series.pop(notice, None)

    # -- the writer --------------------------------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Until cancelled."""
        shortest, longest = self._pace.pause_seconds
        pause = shortest
        while True:
            job = await self._next_job()
            if (seconds := self._bucket.take(self._clock())) > 0:
                await self._sleep(seconds)
            wanted = await self._attempt(job)
            if wanted is None:
                pause = shortest
                continue
            await self._sleep(max(wanted, pause * self._spread()))
            pause = min(pause * 2, longest)

    async def _next_job(self) -> Job:
        while True:
            if not self._outbox:
                self._told_of_drops = False
                self._news.clear()
                await self._news.wait()
            now = self._clock()
            job = self._outbox.next(now)
            if job is not None:
                return job
            await self._sleep(min(self._outbox.next_due() - now, _LOOK_SECONDS))

    async def _attempt(self, job: Job) -> float | None:
        """Writes one thing. None: go on with the next; else the server is not well, and wants us to wait for so many seconds."""
        try:
            match job:
                case Notice():
                    await self._write_event(job)
                case Eviction():
                    await self._write_eviction(job)
                case _:
                    await self._write_annotations()
        except _NO_ANSWER as error:
            self._tell_away(f"{type(error).__name__}: {error}")
            return 0.0
        except AnswerError as error:
            if error.status in _RETRIED or error.status >= 500:
                return await self._retry_later(job, error)
            self._tell_refusal(job, error)
            self._give_up(job)
        self._tell_back()
        return None

    async def _retry_later(self, job: Job, error: AnswerError) -> float | None:
        wanted = min(error.retry_after_seconds, self._pace.max_retry_after_seconds)
        shortest, longest = self._pace.job_seconds
        pause = min(shortest * 2 ** min(self._outbox.failed(job) - 1, 16), longest) * self._spread()
        self._outbox.postpone(job, self._clock() + max(wanted, pause))
        if isinstance(job, Eviction) and error.status == 429:  # a PodDisruptionBudget speaks; the server is well
            self._tell_back()
            return None
        self._tell_away(str(error))
        if error.status == 401:
            await self._renew()
        return wanted

    async def _write_event(self, notice: Notice) -> None:
        series = self._series.get(notice)
        if series is None:
            return  # lost for want of room a moment ago
        count, done = series.count, True
        if not (series.written and await self._writes.recount_event(notice, count)):
            done = await self._writes.create_event(notice, count)
            series.written = True
        if self._series.get(notice) is not series:
            return  # lost meanwhile, and perhaps begun anew
        series.due = self._clock() + (self._pace.recount_seconds if done else self._pace.job_seconds[0])
        if done and series.count == count:
            self._outbox.done(notice)
        else:
            self._outbox.postpone(notice, series.due)

    async def _write_annotations(self) -> None:
        values = dict(self._annotations)
        await self._writes.annotate_node(values)
        for key, value in values.items():
            if self._annotations[key] == value:
                del self._annotations[key]
        if not self._annotations:
            self._outbox.done(_ANNOTATIONS)

    async def _write_eviction(self, eviction: Eviction) -> None:
        lived = await self._writes.evict(eviction)
        self._outbox.done(eviction)
        if lived:
            _log.info("pod_evicted", pod="/".join(eviction.pod), pod_uid=eviction.uid, reason=eviction.reason)

    def _give_up(self, job: Job) -> None:
        self._outbox.done(job)
        if isinstance(job, Notice):
            if (series := self._series.get(job)) is not None:
                series.due = self._clock() + self._pace.recount_seconds
        elif job == _ANNOTATIONS:
            self._annotations.clear()

    async def _renew(self) -> None:
        """Once for a row of refusals, since it ends the watch that shares the connection."""
        if not self._renewed:
            self._renewed = True
            try:
                await self._server.renew()
            except SettingsError as error:
                _log.warning("credentials_not_renewed", error=str(error))

    def _spread(self) -> float:
        return 0.8 + 0.4 * self._jitter()

    # -- the log -----------------------------------------------------------------------------------------------------------

    def _tell_away(self, text: str) -> None:
        if not self._away:
            self._away = True
            _log.warning("announcements_wait", error=text)

    def _tell_back(self) -> None:
        self._renewed = False
        if self._away:
            self._away = False
            _log.info("announcements_go_on", waiting=len(self._outbox), dropped=self.dropped)

    def _tell_refusal(self, job: Job, error: AnswerError) -> None:
        """Once an hour for each kind."""
        what, now = _what(job), self._clock()
        told = self._told_of_refusal.get((what, error.status))
        if "NamespaceTerminating" in error.causes or (told is not None and now - told < _TELL_AGAIN_SECONDS):
            return  # of a namespace that ends, nobody reads the events any more
        self._told_of_refusal[what, error.status] = now
        _log.warning("announcement_refused", what=what, error=str(error), remedy=remedy(what, error.status, self._node))


def _what(job: Job) -> What:
    match job:
        case Notice():
            return "event"
        case Eviction():
            return "eviction"
        case _:
            return "annotation"


def _rank(job: Job) -> int:
    """The node's annotations first, events last: they are also what is lost first."""
    return ("annotation", "eviction", "event").index(_what(job))
