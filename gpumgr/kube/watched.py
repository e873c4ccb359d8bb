"""Decodes the objects of a watch, and reports objects that can't be read."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog

from gpumgr.common.foreign_text import LONG_BYTES, UnreadableText, decode_stored, on_thread_if_long
from gpumgr.kube.client import API_FAILURES, UNREADABLE, ApiServer, unreadable_text
from gpumgr.kube.publisher.events import Event, EventSeries, ObjectRef

_log = structlog.get_logger(__name__)

UNREADABLE_REASON: Final = "GpumgrCannotRead"
#: The most events after a list, because users can store any number of unreadable objects.
_MOST_EVENTS: Final = 20
#: The last part of a watch's path -> the kind of its objects, which the items of a list lack.
_KINDS: Final = {
    "pods": "Pod",
    "nodes": "Node",
    "configmaps": "ConfigMap",
    "resourcequotas": "ResourceQuota",
    "resourceclaims": "ResourceClaim",
    "resourceclaimtemplates": "ResourceClaimTemplate",
    "resourceslices": "ResourceSlice",
}


class Keyed(Protocol):
    @property
    def uid(self) -> str: ...


T = TypeVar("T", bound=Keyed)


class Watched(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The selected objects of a path. `decode` takes the JSON of an object; if it returns None, the object is ignored. `parse` takes the
    result of `decode`. For objects with more than `thread_bytes` both run on a thread. `write_events`: whether an object that can't be read
    gets an event now."""

    path: str
    query: Mapping[str, str] = msgspec.field(default_factory=dict)
    parse: Callable[[Any], T]
    decode: Callable[[msgspec.Raw], Any] = decode_stored
    thread_bytes: int = LONG_BYTES
    write_events: Callable[[], bool] = lambda: True


class Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    uid: str = ""
    namespace: str = ""
    name: str = ""


class _Item(msgspec.Struct):
    metadata: Metadata


def metadata_of(item: msgspec.Raw) -> Metadata:
    """The UID is "" if the metadata can't be read."""
    try:
        return decode_stored(item, _Item).metadata
    except UnreadableText:
        return Metadata()


class ObjectReader(Generic[T]):
    """`unreadable`: UID ("" for objects without one) -> why the object can't be read."""

    def __init__(self, server: ApiServer, watched: Watched[T]) -> None:
        self._server, self._watched = server, watched
        self.unreadable: dict[str, str] = {}
        self._events_left = _MOST_EVENTS
        #: The event loop has only weak references to tasks.
        self._writing: set[asyncio.Task[None]] = set()

    def listed(self, uids: Collection[str]) -> None:
        """Call it after a list that has shown these objects."""
        self.unreadable = {uid: why for uid, why in self.unreadable.items() if uid in uids}
        self._events_left = _MOST_EVENTS

    async def read(self, item: msgspec.Raw, metadata: Metadata, last: T | None) -> T | None:
        """The object, None if it is ignored, or `last` if it can't be read."""
        try:
            if not metadata.uid:
                raise ValueError("it has no UID, or is not an object")
            found = await on_thread_if_long(self._decoded, item, self._watched.thread_bytes)
        except UNREADABLE as error:
            self._report(metadata, error)
            return last
        self.unreadable.pop(metadata.uid, None)
        return found

    def _decoded(self, item: msgspec.Raw) -> T | None:
        decoded = self._watched.decode(item)
        return self._watched.parse(decoded) if decoded is not None else None

    def _report(self, about: Metadata, error: Exception) -> None:
        if about.uid in self.unreadable:
            return
        why = self.unreadable[about.uid] = unreadable_text(error)
        shown = "/".join(filter(None, (about.namespace, about.name))) or None
        _log.warning("api_object_unreadable", path=self._watched.path, name=shown, uid=about.uid, error=why)
        if about.uid and self._events_left > 0 and self._watched.write_events():
            self._events_left -= 1
            task = asyncio.create_task(self._write_event(about, why), name="unreadable_object_event")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write_event(self, about: Metadata, why: str) -> None:
        _, root, *parts = self._watched.path.split("/")
        version, kind = "/".join(parts[: 1 if root == "api" else 2]), _KINDS.get(parts[-1], parts[-1])
        ref = ObjectRef(kind=kind, namespace=about.namespace, name=about.name, uid=about.uid, api_version=version)
        text = f"gpumgr can't read this object ({why}) and continues with its last readable state; correct or delete it"
        event = Event(about=ref, reason=UNREADABLE_REASON, message=text, warning=True)
        with contextlib.suppress(*API_FAILURES):  # the log and the metric name the object, too
            await EventSeries.once(event, time.time()).write(self._server, "gpumgr")
