"""What waits to be written to the API server: each thing once, nothing before its time, and what may be lost within a bound."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job", bound=Hashable)


@dataclass(slots=True)
class _Wait:
    """`since`: when it was due first; failures don't change that, `hold` does."""

    due: float
    since: float
    attempts: int = 0


class Outbox(Generic[Job]):
    """Jobs in the order of their arrival, with the time (any one clock's seconds) before which each must not be done.

    `rank` orders jobs that are due together, lowest first. `droppable` ones are `capacity` at most: of more, the oldest is lost. The
    others are as many as there are objects that they are about.
    """

    def __init__(self, capacity: int, *, rank: Callable[[Job], int], droppable: Callable[[Job], bool]) -> None:
        self._capacity, self._rank, self._droppable = capacity, rank, droppable
        self._waiting: dict[Job, _Wait] = {}
        self._droppables = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: Job) -> bool:
        return job in self._waiting

    def put(self, job: Job, due: float) -> Job | None:
        """Adds a job, unless it waits already: then nothing changes. Returns the job that was lost for want of room, if any."""
        if job in self._waiting:
            return None
        self._waiting[job] = _Wait(due, due)
        if not self._droppable(job):
            return None
        self._droppables += 1
        if self._droppables <= self._capacity:
            return None
        lost = next(each for each in self._waiting if self._droppable(each))
        self.done(lost)
        return lost

    def next(self, now: float) -> Job | None:
        """The job to do now. It stays until it is `done`."""
        ready = (job for job, wait in self._waiting.items() if wait.due <= now)
        return min(ready, key=self._rank, default=None)

    def next_due(self) -> float:
        """When the earliest job is due; there must be one."""
        return min(wait.due for wait in self._waiting.values())

    def oldest_seconds(self, now: float) -> float:
        """For how long the oldest job that is due has waited; 0.0 if none is. Who is held does not wait."""
        return max((now - wait.since for wait in self._waiting.values() if wait.since <= now), default=0.0)

    def done(self, job: Job) -> None:
        if self._waiting.pop(job, None) is not None and self._droppable(job):
            self._droppables -= 1

    def attempts(self, job: Job) -> int:
        """How many attempts were in vain so far."""
        wait = self._waiting.get(job)
        return wait.attempts if wait is not None else 0

    def failed(self, job: Job) -> int:
        """One more attempt was in vain. How many there were."""
        wait = self._waiting.get(job)
        if wait is None:
            return 1
        wait.attempts += 1
        return wait.attempts

    def postpone(self, job: Job, due: float) -> None:
        """Not before `due`; nothing if the job was lost meanwhile."""
        if (wait := self._waiting.get(job)) is not None:
            wait.due = due

    def hold(self, job: Job, due: float) -> None:
        """Not before `due`, and that is as it should be: it counts as waiting only from then on."""
        if (wait := self._waiting.get(job)) is not None:
            wait.due = wait.since = due

    def again(self, job: Job, due: float) -> None:
        """It was done, and is to be done once more from `due` on."""
        if job in self._waiting:
            self._waiting[job] = _Wait(due, due)


class TokenBucket:
    """`burst` at once, `per_second` in the long run. Times are seconds of one clock."""

    def __init__(self, *, per_second: float, burst: int, now: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._tokens, self._at = float(burst), now

    def take(self, now: float) -> float:
        """Takes a token; how many seconds to wait until it may be used."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second) - 1
        self._at = now
        return max(0.0, -self._tokens / self._per_second)
