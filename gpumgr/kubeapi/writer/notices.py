"""What people are told through the API server, as the JSON bodies of requests. Pure.

Shapes: core/v1 Event as `kubectl describe` reads it (without eventTime, so the API server holds it to the rules of old events),
policy/v1 Eviction, and JSON merge patches (RFC 7386).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.pods import PodKey

COMPONENT: Final = "gpumgr"
#: Of an event: the allocations that it is about, as the log, the history and the pod's annotations call them.
ALLOCATION_ANNOTATION: Final = "gpumgr.io/allocation"
#: The API server's own bound for an event's message (events.k8s.io); etcd would take more, people would not.
MAX_MESSAGE_BYTES: Final = 1024
#: Of the message, at most for the allocations; all of them are in the annotation.
_MAX_NAMES_BYTES: Final = 256
#: A name of an object has 253 characters at most.
_MAX_NAME: Final = 236
#: Where events of objects without a namespace are, as the kubelet does it.
_NO_NAMESPACE: Final = "default"

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What an event is about; `kubectl describe` finds it by name and `uid`. `namespace` is "" for a node."""

    kind: Literal["Pod", "Node"]
    namespace: str = ""
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened. Equal notices are one Event with a count."""

    about: Subject
    reason: str
    message: str
    warning: bool
    allocations: tuple[AllocationId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One life of a pod that shall go. Its UID alone says which; `reason` is for the log, an Eviction has no room for it."""

    uid: str
    pod: PodKey = field(compare=False)
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How often a notice was heard, and when first and last (unix seconds)."""

    count: int
    first_at: float
    last_at: float


def pod_subject(pod: PodKey, uid: str) -> Subject:
    return Subject(kind="Pod", namespace=pod[0], name=pod[1], uid=uid)


def node_subject(node: str) -> Subject:
    """The kubelet takes the name for a UID in events, and `kubectl describe node` looks for that."""
    return Subject(kind="Node", name=node, uid=node)


def event_namespace(notice: Notice) -> str:
    """Where the event lies: the API server demands the subject's own namespace."""
    return notice.about.namespace or _NO_NAMESPACE


def event_name(notice: Notice, first_at: float) -> str:
    """The same notice of the same moment has the same name, so that a repeated request makes no second Event."""
    about = notice.about
    text = "\0".join(
        (about.uid, notice.reason, notice.message, str(notice.warning), ",".join(notice.allocations), repr(first_at))
    )
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return f"{about.name[:_MAX_NAME].rstrip('-.')}.{digest[:16]}"


def event_body(notice: Notice, count: Count, node: str) -> Body:
    """A whole Event."""
    about = notice.about
    subject = {"apiVersion": "v1", "kind": about.kind, "namespace": about.namespace, "name": about.name, "uid": about.uid}
    metadata: Body = {"namespace": event_namespace(notice), "name": event_name(notice, count.first_at)}
    if notice.allocations:
        metadata["annotations"] = {ALLOCATION_ANNOTATION: ",".join(notice.allocations)}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": metadata,
        "involvedObject": {key: value for key, value in subject.items() if value},
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason,
        "message": full_message(notice),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": timestamp(count.first_at),
        **recount_patch(count),
    }


def full_message(notice: Notice) -> str:
    """The message with its allocations at the end, in as many bytes as the API server takes. Of the two the message is cut."""
    names = _names(notice.allocations)
    return cut(notice.message, MAX_MESSAGE_BYTES - len(names.encode())) + names


def recount_patch(count: Count) -> Body:
    """What changes when an Event happens again."""
    return {"count": count.count, "lastTimestamp": timestamp(count.last_at)}


def annotations_patch(values: Mapping[str, str | None], *, uid: str | None = None) -> Body:
    """A merge patch of an object's annotations; None takes one away. With `uid` the API server refuses it (409) for another object of
    the name."""
    return {"metadata": {**({"uid": uid} if uid is not None else {}), "annotations": dict(values)}}


def eviction_body(eviction: Eviction) -> Body:
    namespace, name = eviction.pod
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": {"preconditions": {"uid": eviction.uid}},
    }


def cut(text: str, max_bytes: int) -> str:
    """The text, or its beginning and "…", in `max_bytes` bytes of UTF-8 at most."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"


def timestamp(unix_seconds: float) -> str:
    """metav1.Time: whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _names(allocations: Sequence[AllocationId]) -> str:
    if not allocations:
        return ""
    word = "allocation" if len(allocations) == 1 else "allocations"
    return f" [{word} {cut(', '.join(allocations), _MAX_NAMES_BYTES)}]"
