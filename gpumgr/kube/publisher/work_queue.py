"""The publisher's queue: one job per object, in order of priority, with retries, and a bound on events."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

#: What a job writes, in order of priority. The node's annotations, labels and condition are one job each.
What = Literal["annotations", "labels", "condition", "eviction", "pod", "event"]
_ORDER: Final[tuple[What, ...]] = get_args(What)


class Job(NamedTuple):
    """Writes the current desired state of an object. `subject` is the UID of a pod, the series of an event, None for the node."""

    what: What
    subject: Hashable = None


@dataclass(slots=True)
class _Item:
    """`since`: when the job was due first; failures do not change it, `held` does. `again`: when a change that came after the job was
    handed out is due."""

    due: float
    since: float
    attempts: int = 0
    again: float | None = None


class WorkQueue:
    """Jobs in order of arrival, each with the time (seconds of one clock) at which it is due.

    At most `capacity` events wait; of more, the oldest is dropped. The number of other jobs is bounded by the number of objects.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: dict[Job, _Item] = {}
        self._active: _Item | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, job: Job, due: float) -> Job | None:
        """Adds a job, or brings forward one that waits; one that backs off after a failure keeps its time. A job that is being written
        is due again at `due`. Returns the event that was dropped for it, if any."""
        if (item := self._items.get(job)) is not None:
            item.again = due
            if not item.attempts and due < item.due:
                item.due = item.since = due
            return None
        self._items[job] = _Item(due, due)
        events = [each for each in self._items if each.what == "event"] if job.what == "event" else []
        if len(events) <= self._capacity:
            return None
        del self._items[events[0]]
        return events[0]

    def next(self, now: float) -> Job | None:
        """The job to write now. It remains in the queue until it is `done`."""
        due = (job for job, item in self._items.items() if item.due <= now)
        job = min(due, key=lambda job: _ORDER.index(job.what), default=None)
        self._active = self._items[job] if job is not None else None
        if self._active is not None:
            self._active.again = None
        return job

    def next_due(self) -> float:
        """When the next job is due; there must be one."""
        return min(item.due for item in self._items.values())

    def oldest_seconds(self, now: float) -> float:
        """How long the oldest job has been due; 0.0 if none is."""
        return max((now - item.since for item in self._items.values() if item.since <= now), default=0.0)

    def done(self, job: Job) -> None:
        """`job`, which `next` returned last, is written, or is given up. It remains if its object has changed since."""
        item = self._items.get(job)
        if item is None or item is not self._active:
            return  # removed, and perhaps added again, while it was written
        del self._items[job]
        if item.again is not None:
            self._items[job] = _Item(item.again, item.again)

    def remove(self, job: Job) -> bool:
        """Cancels a job. False if it does not wait."""
        return self._items.pop(job, None) is not None

    def attempts(self, job: Job) -> int:
        """How often the job has failed."""
        return item.attempts if (item := self._items.get(job)) is not None else 0

    def retry(self, job: Job, due: float, *, held: bool = False) -> None:
        """The job failed and is due again. `held`: it does not count as waiting until then."""
        if (item := self._items.get(job)) is not None:
            item.attempts += 1
            item.due, item.since = due, due if held else item.since


class TokenBucket:
    """Allows `burst` at once and `per_second` in the long run. Times are seconds of one clock."""

    def __init__(self, per_second: float, burst: int, now: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._tokens, self._at = float(burst), now

    def take(self, now: float) -> float:
        """Takes a token and returns 0.0; if there is none, returns the seconds until there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1 - 1e-6:  # rounding must not cost another wait
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0
