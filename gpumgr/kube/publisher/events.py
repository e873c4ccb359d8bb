"""Kubernetes Events: values, and the JSON bodies of their requests. Pure.

Shape: core/v1 Event as `kubectl describe` reads it. Without `eventTime` the API server applies the validation of core/v1 and not that of
events.k8s.io.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.pods import PodKey

COMPONENT: Final = "gpumgr"
#: Annotation of an event: the ids of its allocations, which the log, the history and the pod's annotations use, too.
ALLOCATION_ANNOTATION: Final = "gpumgr.io/allocation"
#: The limit of events.k8s.io for a message; core/v1 itself has none.
MAX_MESSAGE_BYTES: Final = 1024
#: Limit for the allocation ids at the end of a message. The annotation has all of them.
_MAX_IDS_BYTES: Final = 256
#: The name of an object has at most 253 characters; 17 are for the suffix.
_MAX_NAME: Final = 236

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """The object that an event is about; `kubectl describe` finds its events by name and `uid`. `namespace` is "" for an
    object without one, such as a node."""

    kind: str
    namespace: str = ""
    name: str
    uid: str
    api_version: str = "v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One occurrence. `allocations` are the ids of the allocations that it is about."""

    about: ObjectRef
    reason: str
    message: str
    warning: bool
    allocations: tuple[AllocationId, ...] = ()

    def text(self) -> str:
        """The message with the allocation ids at the end, cut to the API server's limit."""
        ids = ""
        if self.allocations:
            word = "allocation" if len(self.allocations) == 1 else "allocations"
            ids = f" [{word} {cut(', '.join(self.allocations), _MAX_IDS_BYTES)}]"
        return cut(self.message, MAX_MESSAGE_BYTES - len(ids.encode())) + ids


@dataclass(slots=True, kw_only=True, eq=False)
class EventSeries:
    """All occurrences that the API server has as one Event object. Times are unix seconds; `created`: the object exists there."""

    event: Event
    text: str
    first_at: float
    last_at: float
    count: int = 0
    created: bool = False

    @property
    def path(self) -> str:
        """The path of the collection. An event is in the namespace of its object; those of nodes are in `default`, as the kubelet's are."""
        return f"/api/v1/namespaces/{self.event.about.namespace or 'default'}/events"

    @property
    def name(self) -> str:
        """Depends on what never changes in the series, so that a repeated request creates no second object."""
        about, event = self.event.about, self.event
        parts = (about.uid, event.reason, event.message, str(event.warning), ",".join(event.allocations), repr(self.first_at))
        digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
        return f"{about.name[:_MAX_NAME].rstrip('-.')}.{digest[:16]}"

    def body(self, node: str) -> Body:
        """The Event object."""
        event, about = self.event, self.event.about
        ref = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "namespace": about.namespace,
            "name": about.name,
            "uid": about.uid,
        }
        metadata: Body = {"namespace": about.namespace or "default", "name": self.name}
        if event.allocations:
            metadata["annotations"] = {ALLOCATION_ANNOTATION: ",".join(event.allocations)}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": {key: value for key, value in ref.items() if value},
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": timestamp(self.first_at),
            **self.patch(),
        }

    def patch(self) -> Body:
        """A merge patch: what changes with each occurrence."""
        return {"message": self.text, "count": self.count, "lastTimestamp": timestamp(self.last_at)}


def pod_ref(pod: PodKey, uid: str) -> ObjectRef:
    return ObjectRef(kind="Pod", namespace=pod[0], name=pod[1], uid=uid)


def node_ref(node: str) -> ObjectRef:
    """The kubelet writes the node's name as the UID in events, and `kubectl describe node` searches for that."""
    return ObjectRef(kind="Node", name=node, uid=node)


def cut(text: str, max_bytes: int) -> str:
    """The text, or its beginning and "…", in at most `max_bytes` bytes of UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"


def timestamp(unix_seconds: float) -> str:
    """metav1.Time: whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
