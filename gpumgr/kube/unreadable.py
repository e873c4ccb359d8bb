"""Objects of a watch that can't be read: each is logged once, and gets an event where this process may write events."""

import asyncio
import contextlib
import time
from typing import Final

import structlog

from gpumgr.common.foreign_text import UnreadableText
from gpumgr.kube.client import API_FAILURES, ApiServer
from gpumgr.kube.publisher.events import Event, EventSeries, ObjectRef

_log = structlog.get_logger(__name__)

REASON: Final = "GpumgrCannotRead"
#: The most events that are written after a list, since a user could store any number of such objects.
_MOST_EVENTS: Final = 20
#: The last part of a watch's path -> the kind of its objects. The items of a list do not have it.
_KINDS: Final = {
    "pods": "Pod",
    "nodes": "Node",
    "configmaps": "ConfigMap",
    "resourcequotas": "ResourceQuota",
    "resourceclaims": "ResourceClaim",
    "resourceclaimtemplates": "ResourceClaimTemplate",
    "resourceslices": "ResourceSlice",
}


class UnreadableObjects:
    """The unreadable objects of one watch. `reasons`: UID -> why it can't be read."""

    def __init__(self, server: ApiServer, path: str, *, write_events: bool) -> None:
        self._server, self._path, self._write_events = server, path, write_events
        self.reasons: dict[str, str] = {}
        self._events_left = _MOST_EVENTS
        #: The event loop itself keeps only weak references to its tasks.
        self._writing: set[asyncio.Task[None]] = set()

    def listed(self, uids: set[str]) -> None:
        """Call it after a list. `uids`: the listed objects that can't be read."""
        self.reasons = {uid: why for uid, why in self.reasons.items() if uid in uids}
        self._events_left = _MOST_EVENTS

    def add(self, uid: str, namespace: str, name: str, error: Exception) -> None:
        """Reports the object, once. `uid` is "" for an object without one."""
        if uid in self.reasons:
            return
        plain = isinstance(error, UnreadableText | RecursionError)
        why = str(UnreadableText(error if plain else f"{type(error).__name__}: {error}"))
        self.reasons[uid] = why
        shown = "/".join(filter(None, (namespace, name))) or None
        _log.warning("api_object_unreadable", path=self._path, name=shown, uid=uid, error=why)
        if uid and self._write_events and self._events_left > 0:
            self._events_left -= 1
            task = asyncio.create_task(self._write(uid, namespace, name, why), name="unreadable_object_event")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, uid: str, namespace: str, name: str, why: str) -> None:
        _, root, *parts = self._path.split("/")
        version, kind = "/".join(parts[: 1 if root == "api" else 2]), _KINDS.get(parts[-1], parts[-1])
        about = ObjectRef(kind=kind, namespace=namespace, name=name, uid=uid, api_version=version)
        text = f"gpumgr can't read this object ({why}) and continues with its last readable state; correct or delete it"
        event, now = Event(about=about, reason=REASON, message=text, warning=True), time.time()
        with contextlib.suppress(*API_FAILURES):  # the log and the metric name the object too
            await EventSeries.once(event, now).write(self._server, "gpumgr")
