"""One writer of everything that people should see in the API server: events, annotations of pods, the node's face, evictions.

Law 1. Nobody waits for it: what is said is put into a queue. Events are bounded, and an absent API server costs nothing but the oldest
       of them; the rest is one job for each object that exists.
Law 2. Of a pod and of the node the latest state is written, before any event; of a repeated event the count, once a minute at most.
Law 3. Absence is weather: retried with growing, jittered pauses. A refusal that no retry can change is dropped, and the log says,
       once an hour, which right is missing.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn

import aiohttp
import structlog

from gpumgr.agent.picture import OutboxState
from gpumgr.allocator.pods import PodKey
from gpumgr.errors import SettingsError
from gpumgr.kubeapi.client import AnswerError, ApiServer
from gpumgr.kubeapi.writer.condition import Condition
from gpumgr.kubeapi.writer.evictions import Evictions
from gpumgr.kubeapi.writer.jobs import RIGHTS, Job, PodNote, droppable, rank
from gpumgr.kubeapi.writer.nodeface import NodeFace
from gpumgr.kubeapi.writer.notices import Eviction, Notice
from gpumgr.kubeapi.writer.outbox import Outbox, TokenBucket
from gpumgr.kubeapi.writer.pace import Pace
from gpumgr.kubeapi.writer.series import Series
from gpumgr.kubeapi.writer.weather import Weather
from gpumgr.kubeapi.writer.writes import Writes

_log = structlog.get_logger(__name__)

_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, SettingsError)
#: Statuses below 500 that tell of the server's state and not of our request. 401: the credentials are read again.
_RETRIED: Final = frozenset({401, 408, 409, 429})
#: While other jobs wait for their time, new ones are noticed within this time.
_LOOK_SECONDS: Final = 0.25


class Announcer:
    """`run` it forever; everything else returns at once. All calls belong into the event loop.

    `clock` is monotonic, `wall` tells unix seconds.
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
        self._server, self._writes, self._pace = server, Writes(server, node), pace or Pace()
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._outbox: Outbox[Job] = Outbox(self._pace.capacity, rank=rank, droppable=droppable)
        self._bucket = TokenBucket(per_second=self._pace.per_second, burst=self._pace.burst, now=clock())
        self._series = Series(self._writes, self._outbox, self._pace, clock=clock, wall=wall)
        self._node = NodeFace(self._writes, self._outbox, self._pace, clock=clock, wall=wall)
        self._evictions = Evictions(self._writes, self._outbox, clock=clock)
        self._pods: dict[str, Mapping[str, str | None]] = {}
        self._weather = Weather(node, clock)
        self._news = asyncio.Event()
        self._renewed = False
        #: Hears of an eviction that the API server refuses for good, and why. Set by whoever wants to know.
        self.on_refused_eviction: Callable[[Eviction, str], None] = lambda _eviction, _why: None

    def state(self) -> OutboxState:
        return OutboxState(
            waiting=len(self._outbox),
            oldest_seconds=self._outbox.oldest_seconds(self._clock()),
            dropped=self._weather.dropped,
            written=self._weather.written,
            away=self._weather.away,
        )

    # -- what others say ---------------------------------------------------------------------------------------------------

    def event(self, notice: Notice) -> None:
        """An Event for `kubectl describe`; a long message is cut."""
        self._put(notice, self._series.heard(notice))

    def annotate_pod(self, pod: PodKey, uid: str, values: Mapping[str, str | None]) -> None:
        """Sets annotations of this life of the pod; None takes one away. What was said of it before and is not written yet is void."""
        self._pods[uid] = dict(values)
        self._put(PodNote(uid=uid, pod=pod), self._clock())

    def forget_pod(self, pod: PodKey, uid: str) -> None:
        """This life of the pod is over: nothing is written there any more, and it need not be evicted."""
        self._pods.pop(uid, None)
        self._outbox.done(PodNote(uid=uid, pod=pod))
        self._evictions.forget(uid)

    def annotate_node(self, key: str, value: str | None) -> None:
        """Sets an annotation of this node; None takes it away."""
        self._node.annotate(key, value)
        self._wake()

    def label_node(self, labels: Mapping[str, str]) -> None:
        """All labels of this node that are ours; say it again and again, and they are kept up."""
        self._node.label(labels)
        self._wake()

    def tell_condition(self, condition: Condition) -> None:
        """The node's condition; say it again and again, and its heartbeat goes on."""
        self._node.tell(condition)
        self._wake()

    def evict(self, pod: PodKey, uid: str, *, reason: str) -> None:
        """Evicts this life of the pod, as soon as its PodDisruptionBudget lets it go. `reason` is told in the log."""
        self._evictions.ask(pod, uid, reason)
        self._wake()

    def cancel_evict(self, uid: str, *, reason: str | None = None) -> None:
        """It need not be evicted for this reason any more (in the words of `evict`; None: for no reason at all), and is not if nobody has
        another one. Nothing if it was not to be, or is gone."""
        self._evictions.cancel(uid, reason)

    def lost(self, number: int = 1) -> None:
        """So many events were lost before they came here, as nobody knew whose they are."""
        self._weather.dropped += number

    def _put(self, job: Job, due: float) -> None:
        lost = self._outbox.put(job, due)
        self._wake()
        if isinstance(lost, Notice):
            self._series.lost(lost)
            self._weather.lost(len(self._outbox))

    def _wake(self) -> None:
        if self._outbox:
            self._news.set()

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
                self._weather.all_said()
                self._news.clear()
                await self._news.wait()
                continue
            now = self._clock()
            job = self._outbox.next(now)
            if job is not None:
                return job
            await self._sleep(min(self._outbox.next_due() - now, _LOOK_SECONDS))

    async def _attempt(self, job: Job) -> float | None:
        """Writes one thing. None: go on with the next; else the server is not well, and wants us to wait for so many seconds."""
        try:
            await self._write(job)
            self._weather.went(job)
        except _NO_ANSWER as error:
            self._weather.failed(f"{type(error).__name__}: {error}")
            return 0.0
        except AnswerError as error:
            if (error.status in _RETRIED or error.status >= 500) and not self._is_hopeless(job, error):
                return await self._retry_later(job, error)
            self._weather.refused(job, error)
            self._give_up(job)
            if isinstance(job, Eviction):
                remedy = f"; allow it in the agent's ClusterRole: {RIGHTS['eviction']}" if error.status == 403 else ""
                self.on_refused_eviction(job, f"{error}{remedy}")
        except Exception:  # a bug: the other jobs go on without this one, and whoever runs us tells of it
            self._outbox.postpone(job, self._clock() + self._job_pause(job))
            raise
        self._tell_back()
        return None

    async def _write(self, job: Job) -> None:
        match job:
            case Notice():
                await self._series.write(job)
            case Eviction():
                await self._evictions.write(job)
            case PodNote():
                await self._write_pod(job)
            case _:
                await self._node.write(job)

    async def _write_pod(self, job: PodNote) -> None:
        """A pod that is gone needs no annotations; of what changed meanwhile the latest is written next."""
        values = self._pods.get(job.uid)
        if values is not None:
            await self._writes.annotate_pod(job.pod, job.uid, values)
        if self._pods.get(job.uid) is values:
            self._pods.pop(job.uid, None)
            self._outbox.done(job)
        else:
            self._outbox.again(job, self._clock())

    def _is_hopeless(self, job: Job, error: AnswerError) -> bool:
        """Conflict after conflict: another life of the pod has the name, and we have not heard of it yet."""
        if not (isinstance(job, PodNote) and error.status == 409):
            return False
        return self._outbox.attempts(job) + 1 >= self._pace.conflicts

    async def _retry_later(self, job: Job, error: AnswerError) -> float | None:
        wanted = min(error.retry_after_seconds, self._pace.max_retry_after_seconds)
        due = self._clock() + max(wanted, self._job_pause(job))
        budget = isinstance(job, Eviction) and error.status == 429
        (self._outbox.hold if budget else self._outbox.postpone)(job, due)
        if budget or (isinstance(job, PodNote) and error.status == 409):
            self._tell_back()  # a PodDisruptionBudget speaks, or another writer; all is well
            return None
        self._weather.failed(str(error))
        if error.status == 401:
            await self._renew()
        return wanted

    def _give_up(self, job: Job) -> None:
        match job:
            case Notice():
                self._series.give_up(job)
            case PodNote():
                self._pods.pop(job.uid, None)
                self._outbox.done(job)
            case Eviction():
                self._evictions.forget(job.uid)
            case _:
                self._node.give_up(job)

    def _job_pause(self, job: Job) -> float:
        """Seconds until this one, which failed once more, is tried again."""
        shortest, longest = self._pace.job_seconds
        doublings: int = min(self._outbox.failed(job) - 1, 16)
        return min(shortest * float(2**doublings), longest) * self._spread()

    async def _renew(self) -> None:
        """Once for a row of refusals, since it ends the watch that shares the connection."""
        if not self._renewed:
            self._renewed = True
            try:
                await self._server.renew()
            except SettingsError as error:
                _log.warning("credentials_not_renewed", error=str(error))

    def _tell_back(self) -> None:
        self._renewed = False
        self._weather.answers(len(self._outbox))

    def _spread(self) -> float:
        return 0.8 + 0.4 * self._jitter()
