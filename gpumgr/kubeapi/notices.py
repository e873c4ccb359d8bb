"""What people are told through the API server, as the JSON bodies of requests. Pure.

Shapes: core/v1 Event as `kubectl describe pod` reads it (without eventTime, so the API server holds it to the rules of old events),
policy/v1 Eviction, and JSON merge patches (RFC 7386).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from gpumgr.allocator.pods import PodKey

COMPONENT: Final = "gpumgr"
#: The API server's own bound for an event's message (events.k8s.io); etcd would take more, people would not.
MAX_MESSAGE_BYTES: Final = 1024
#: A name of an object has 253 characters at most.
_MAX_POD_NAME: Final = 236

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened to one life of a pod. Equal notices are one Event with a count."""

    pod: PodKey
    uid: str
    reason: str
    message: str
    warning: bool


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


def event_name(notice: Notice, first_at: float) -> str:
    """The same notice of the same moment has the same name, so that a repeated request makes no second Event."""
    text = "\0".join((notice.uid, notice.reason, notice.message, str(notice.warning), repr(first_at)))
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return f"{notice.pod[1][:_MAX_POD_NAME].rstrip('-.')}.{digest[:16]}"


def event_body(notice: Notice, count: Count, node: str) -> Body:
    """A whole Event. Its namespace is the pod's, as the API server demands."""
    namespace, name = notice.pod
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": event_name(notice, count.first_at)},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": notice.uid},
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason,
        "message": cut(notice.message, MAX_MESSAGE_BYTES),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": _timestamp(count.first_at),
        **recount_patch(count),
    }


def recount_patch(count: Count) -> Body:
    """What changes when an Event happens again."""
    return {"count": count.count, "lastTimestamp": _timestamp(count.last_at)}


def annotations_patch(values: Mapping[str, str | None]) -> Body:
    """A merge patch of an object's annotations; None takes one away."""
    return {"metadata": {"annotations": dict(values)}}


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


def _timestamp(unix_seconds: float) -> str:
    """metav1.Time: whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
