"""What waits to be written to the API server: bounded, each thing once, and nothing before its time."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job", bound=Hashable)


@dataclass(slots=True)
class _Wait:
    due: float
    attempts: int = 0


class Outbox(Generic[Job]):
    """Jobs in the order of their arrival, with the time (any one clock's seconds) before which each must not be done.

    `rank` orders jobs that are due together, lowest first, and says which are lost when there are more than `capacity`: the oldest of
    those with the highest rank.
    """

    def __init__(self, capacity: int, *, rank: Callable[[Job], int]) -> None:
        self._capacity, self._rank = capacity, rank
        self._waiting: dict[Job, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: Job) -> bool:
        return job in self._waiting

    def put(self, job: Job, due: float) -> Job | None:
        """Adds a job, unless it waits already: then nothing changes. Returns the job that was lost for want of room, if any."""
        self._waiting.setdefault(job, _Wait(due))
        if len(self._waiting) <= self._capacity:
            return None
        # max() takes the first of equals: the oldest.
        lost = max(self._waiting, key=self._rank)
        del self._waiting[lost]
        return lost

    def next(self, now: float) -> Job | None:
        """The job to do now. It stays until it is `done`."""
        ready = (job for job, wait in self._waiting.items() if wait.due <= now)
        return min(ready, key=self._rank, default=None)

    def next_due(self) -> float:
        """When the earliest job is due; there must be one."""
        return min(wait.due for wait in self._waiting.values())

    def done(self, job: Job) -> None:
        self._waiting.pop(job, None)

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
