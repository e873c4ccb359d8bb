"""Kubernetes Events: their values, the requests that write them, and which occurrences become one object.

The objects are core/v1 Events without `eventTime`, so the API server does not apply the validation of events.k8s.io.

`EventRecorder` has two rules of client-go's EventCorrelator (k8s.io/client-go/tools/record/events_cache.go), with its constants:
1. Counting: an event with the same message increments the count of its object.
2. Spam filter: per object and type, 25 writes at once, then one every 5 minutes; further writes are dropped. In client-go's default the key
   of the filter lacks the type (option SpamKeyFunc). Here it has the type, so many Normal events never cause a Warning to be dropped.
"""

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from gpumgr.kube.client import ApiServer
from gpumgr.kube.publisher.desired import Desired, TokenBucket
from gpumgr.placement.pods import PodKey

COMPONENT: Final = "gpumgr"
#: Annotation of an event: the ids of its allocations. Log, history and the pod's annotations use the same ids.
ALLOCATION_ANNOTATION: Final = "gpumgr.io/allocation"
#: The limit of events.k8s.io for a message; core/v1 has none.
MAX_MESSAGE_BYTES: Final = 1024
#: Limit for the allocation ids at the end of a message. The annotation has all ids.
_MAX_IDS_BYTES: Final = 256
#: The name of an object has at most 253 characters; 17 are for the suffix.
_MAX_NAME: Final = 236

SPAM_BURST: Final = 25
SPAM_PER_SECOND: Final = 1 / 300
#: The most records of each kind. client-go keeps 4096.
MAX_RECORDS: Final = 1024

Body = dict[str, Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The object of an event. `namespace` is "" for an object without one, such as a node."""

    kind: str
    namespace: str = ""
    name: str
    uid: str
    api_version: str = "v1"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One occurrence. `allocations`: the ids of its allocations."""

    about: ObjectRef
    reason: str
    message: str
    warning: bool
    allocations: tuple[str, ...] = ()

    def text(self) -> str:
        """The message with the allocation ids at the end, cut to MAX_MESSAGE_BYTES."""
        ids = ""
        if self.allocations:
            word = "allocation" if len(self.allocations) == 1 else "allocations"
            ids = f" [{word} {cut(', '.join(self.allocations), _MAX_IDS_BYTES)}]"
        return cut(self.message, MAX_MESSAGE_BYTES - len(ids.encode())) + ids


@dataclass(slots=True, kw_only=True, eq=False)
class EventSeries(Desired):
    """The occurrences that one Event object counts. Times are unix seconds. `created`: the API server has the object."""

    what = "event"
    rights = "create and patch on events"
    event: Event
    first_at: float
    last_at: float
    count: int = 0
    created: bool = False

    @classmethod
    def once(cls, event: Event, at: float) -> "EventSeries":
        """The series of an event that occurs once."""
        return cls(event=event, first_at=at, last_at=at, count=1)

    @property
    def path(self) -> str:
        """The path of the collection. Events of a node are in the namespace `default`."""
        return f"/api/v1/namespaces/{self.event.about.namespace or 'default'}/events"

    @property
    def name(self) -> str:
        """The object's name. It depends only on values that never change in the series, so a repeated request creates no second object."""
        about, event = self.event.about, self.event
        parts = (about.uid, event.reason, event.message, str(event.warning), ",".join(event.allocations), repr(self.first_at))
        digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
        return f"{about.name[:_MAX_NAME].rstrip('-.')}.{digest[:16]}"

    def body(self, node: str) -> Body:
        event, about = self.event, self.event.about
        metadata: Body = {"namespace": about.namespace or "default", "name": self.name}
        if event.allocations:
            metadata["annotations"] = {ALLOCATION_ANNOTATION: ",".join(event.allocations)}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": {key: value for key, value in msgspec.to_builtins(about).items() if value},
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": timestamp(self.first_at),
            **self.patch(),
        }

    async def write(self, server: ApiServer, node: str) -> None:
        """Creates the object or increments its count. Raises what `ApiServer.send` raises.

        404: the API server has removed the event, usually after an hour. 409: an earlier request created it, but the response was lost.
        """
        path = f"{self.path}/{self.name}"
        if self.created and await server.send("PATCH", path, self.patch(), but=(404,)):
            return
        if not await server.send("POST", self.path, self.body(node), but=(409,)):
            await server.send("PATCH", path, self.patch(), but=(404,))
        self.created = True

    def patch(self) -> Body:
        return {"message": self.event.text(), "count": self.count, "lastTimestamp": timestamp(self.last_at)}


def pod_ref(pod: PodKey, uid: str) -> ObjectRef:
    return ObjectRef(kind="Pod", namespace=pod[0], name=pod[1], uid=uid)


def node_ref(node: str) -> ObjectRef:
    """As in the kubelet's events, the UID is the node's name, because `kubectl describe node` searches for that."""
    return ObjectRef(kind="Node", name=node, uid=node)


def cut(text: str, max_bytes: int) -> str:
    """The text, or its beginning and "…", in at most `max_bytes` bytes of UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"


def timestamp(unix_seconds: float) -> str:
    """As metav1.Time, in whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class EventRecorder:
    """Correlates events. Keeps the MAX_RECORDS most recently used records of each kind."""

    def __init__(self) -> None:
        self._series: dict[Event, EventSeries] = {}
        self._buckets: dict[tuple[ObjectRef, bool], TokenBucket] = {}

    def record(self, event: Event, now: float, wall: float) -> EventSeries | None:
        """Adds an occurrence to its series; returns None if the spam filter drops it. `now`: monotonic seconds. `wall`: unix seconds."""
        series = _recent(self._series, event, lambda: EventSeries(event=event, first_at=wall, last_at=wall))
        series.count, series.last_at = series.count + 1, wall
        bucket = _recent(self._buckets, (event.about, event.warning), lambda: TokenBucket(SPAM_PER_SECOND, SPAM_BURST, now))
        return series if bucket.take(now) == 0 else None


def _recent(records: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """Returns the record and marks it as used; makes a missing one. Beyond MAX_RECORDS removes the least recently used one."""
    record = records.pop(key) if key in records else make()
    records[key] = record
    if len(records) > MAX_RECORDS:
        del records[next(iter(records))]
    return record
