"""Event correlation: which occurrences become one Event object, and which are dropped.

The rules are those of client-go's EventCorrelator (k8s.io/client-go/tools/record/events_cache.go), with its constants:
1. Aggregation: from the tenth different message on, within 10 minutes of the last one, events of the same object, type and reason share
   one Event object, which has the latest message with a prefix.
2. Counting: an event with the same message again increments the count of its object.
3. Spam filter: per object and type, 25 writes at once, then one every 5 minutes; what exceeds that is dropped. The type is part of the
   key (client-go's SpamKeyFunc), so that many Normal events about the node drop no Warning.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from gpumgr.kube.publisher.events import MAX_MESSAGE_BYTES, Event, EventSeries, ObjectRef, cut
from gpumgr.kube.publisher.work_queue import TokenBucket

AGGREGATE_EVENTS: Final = 10
AGGREGATE_SECONDS: Final = 600.0
SPAM_BURST: Final = 25
SPAM_PER_SECOND: Final = 1 / 300
AGGREGATE_PREFIX: Final = "(combined from similar events): "
#: Records of each kind that are kept. client-go keeps 4096 for a whole cluster; this is one node.
MAX_RECORDS: Final = 1024

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_Group = tuple[ObjectRef, bool, str]


@dataclass(slots=True)
class _Similar:
    """The different messages of a group, and when (monotonic seconds) the last event occurred."""

    at: float
    texts: dict[str, None] = field(default_factory=dict)


class EventRecorder:
    """Correlates events. Keeps the MAX_RECORDS most recently used records of each kind."""

    def __init__(self) -> None:
        self._similar: dict[_Group, _Similar] = {}
        self._series: dict[tuple[_Group, str | None], EventSeries] = {}
        self._buckets: dict[tuple[ObjectRef, bool], TokenBucket] = {}

    def record(self, event: Event, now: float, wall: float) -> EventSeries | None:
        """Adds an occurrence to its series; None if the spam filter drops it. `now` is monotonic, `wall` unix seconds."""
        group, text = (event.about, event.warning, event.reason), event.text()
        aggregated = self._is_aggregated(group, text, now)
        if aggregated:
            text, event = cut(AGGREGATE_PREFIX + text, MAX_MESSAGE_BYTES), replace(event, allocations=())
        key = (group, None if aggregated else text)
        series = _recent(self._series, key, lambda: EventSeries(event=event, text=text, first_at=wall, last_at=wall))
        series.text, series.count, series.last_at = text, series.count + 1, wall
        bucket = _recent(self._buckets, (event.about, event.warning), lambda: TokenBucket(SPAM_PER_SECOND, SPAM_BURST, now))
        return series if bucket.take(now) == 0 else None

    def _is_aggregated(self, group: _Group, text: str, now: float) -> bool:
        similar = _recent(self._similar, group, lambda: _Similar(now))
        if now - similar.at > AGGREGATE_SECONDS:
            similar.texts.clear()
        similar.at = now
        similar.texts[text] = None
        if len(similar.texts) < AGGREGATE_EVENTS:
            return False
        del similar.texts[next(iter(similar.texts))]
        return True


def _recent(records: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """The record, made if it is missing, as the most recently used one; beyond MAX_RECORDS the least recently used one is removed."""
    record = records.pop(key) if key in records else make()
    records[key] = record
    if len(records) > MAX_RECORDS:
        del records[next(iter(records))]
    return record
