"""The desired state of each object that the publisher writes, and the queue of these states."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

from gpumgr.kube.client import ApiServer

#: In order of priority. Each part of the node is a separate write.
What = Literal["annotations", "labels", "condition", "eviction", "pod", "event"]
#: How often an unchanged state is written again: the Node may have been deleted and registered again, or a missing right granted.
RESYNC_SECONDS: Final = 600.0
_ORDER: Final[tuple[What, ...]] = get_args(What)


@dataclass(eq=False, slots=True, kw_only=True)
class Desired(ABC):
    """The desired state of an object, or of a part of it. Times are seconds of one monotonic clock.

    `rights`: the RBAC rules that the write needs. `insists`: the write is retried even after a refusal, but after all other writes.
    `wanted_at`: when a caller last caused a write. `requests` counts the requests.

    Only the queue sets the other fields. `due`: when the next write is due. `since`: when this write was due first; a failure changes
    `since` only with `held` (see `WorkQueue.retry`). `attempts` counts the failures. `again`: when the next write is due if the state
    changes during a write.
    """

    what: ClassVar[What]
    rights: ClassVar[str]
    insists: ClassVar[bool] = False
    wanted_at: float = -math.inf
    requests: int = 0
    due: float = 0.0
    since: float = 0.0
    attempts: int = 0
    again: float | None = None

    @abstractmethod
    async def write(self, server: ApiServer, node: str) -> None:
        """Writes the present state. Raises what `ApiServer.send` raises."""


class WorkQueue:
    """The states to write, in order of failures, priority and arrival. States that insist are last. At most `capacity` events wait: a
    further event replaces the oldest one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: dict[Desired, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, desired: Desired, due: float) -> Desired | None:
        """Adds a state. A failed write keeps the time of its retry; a state that is being written is due again at `due`. Returns the event
        that was dropped, if any."""
        desired.again = due
        if desired in self._waiting:
            return None
        self._waiting[desired] = None
        desired.due, desired.since, desired.attempts = due, due, 0
        events = [each for each in self._waiting if each.what == "event"] if desired.what == "event" else []
        if len(events) <= self._capacity:
            return None
        del self._waiting[events[0]]
        return events[0]

    def next(self, now: float) -> Desired | None:
        """The state to write now, if any is due. It stays in the queue until `done`."""
        due = (each for each in self._waiting if each.due <= now)
        desired = min(due, key=lambda each: (each.insists, each.attempts, _ORDER.index(each.what)), default=None)
        if desired is not None:
            desired.again = None
        return desired

    def next_due(self) -> float:
        return min(each.due for each in self._waiting)

    def oldest_seconds(self, now: float) -> float:
        """How long the oldest write has been due; 0.0 if none is."""
        return max((now - each.since for each in self._waiting if each.since <= now), default=0.0)

    def done(self, desired: Desired) -> None:
        """Call it when the state from `next` was written or given up. It is queued again if it has changed during the write."""
        if self.remove(desired) and desired.again is not None:
            self.put(desired, desired.again)

    def remove(self, desired: Desired) -> bool:
        """Returns False if the state was not in the queue."""
        return desired in self._waiting and self._waiting.pop(desired) is None

    def retry(self, desired: Desired, due: float, *, held: bool = False) -> None:
        """Call it when the write failed. With `held` the write does not count as late before `due`."""
        desired.attempts += 1
        desired.due, desired.since = due, due if held else desired.since


class TokenBucket:
    """Allows `burst` at once, `per_second` in the long run. Times are seconds of one clock."""

    def __init__(self, per_second: float, burst: int, now: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._tokens, self._at = float(burst), now

    def take(self, now: float) -> float:
        """Takes a token and returns 0.0, or returns the seconds until the next token."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1 - 1e-6:  # rounding must not cost another wait
            return (1 - self._tokens) / self._per_second
        self._tokens -= 1
        return 0.0
