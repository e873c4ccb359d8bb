"""Objects of one kind in the simulated API server, listed and watched."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gpumgr.common.aio import LatestValue
from gpumgr.sim.apiserver_written import Document, status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    version: int
    kind: str
    item: Document


class WatchedObjects:
    """`items`: UID -> object, for reading; `put` and `remove` change them. `delay` is awaited before events are sent."""

    def __init__(self, kind: str, delay: Callable[[], Awaitable[None]]) -> None:
        self.items: dict[str, Document] = {}
        self._kind, self._delay = kind, delay
        self._events: list[_Event] = []
        self._forgotten = 0
        self._version = LatestValue(1)
        self._open: set[asyncio.Timeout] = set()
        #: Whether to send a bookmark even if nothing has changed since the watch began. Kubernetes' API server sends none then.
        self.needless_bookmarks = False

    def put(self, document: Document) -> None:
        """Creates or replaces an object."""
        uid = document["metadata"]["uid"]
        event = "MODIFIED" if uid in self.items else "ADDED"
        self.items[uid] = document
        self._record(event, document)

    def remove(self, uid: str) -> None:
        """Raises KeyError if it does not exist."""
        self._record("DELETED", self.items.pop(uid))

    def forget(self) -> None:
        """Drops the history of changes: no watch can begin at a version up to now."""
        self._forgotten = self._version.value
        self._events.clear()

    def end_watches(self) -> None:
        """Sends bookmarks and ends the open watches, as if their time were over."""
        for each in self._open:
            each.reschedule(asyncio.get_running_loop().time())

    def _record(self, kind: str, document: Document) -> None:
        version = self._version.value + 1
        document["metadata"]["resourceVersion"] = str(version)
        self._events.append(_Event(version=version, kind=kind, item=json.loads(json.dumps(document))))
        self._version.set(version)

    def list(self, *, selected: bool = True) -> web.Response:
        """Returns all objects on one page, as a server may; none if the request's selector selects none."""
        items = [*self.items.values()] if selected else []
        version = str(self._version.value)
        metadata = {"resourceVersion": version}
        return web.json_response({"kind": f"{self._kind}List", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def watch(self, request: web.Request, *, selected: bool = True) -> web.StreamResponse:
        """Sends events until the request's time is over, or its version has been dropped from the history."""
        sent = int(request.query.get("resourceVersion") or self._version.value)
        seconds = float(request.query.get("timeoutSeconds", "300"))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        bookmarks, begun = request.query.get("allowWatchBookmarks") == "true", sent
        try:
            async with self._limit(seconds):
                with self._version.subscribe() as versions:
                    async for _ in versions:
                        if sent < self._forgotten:
                            await _send(response, "ERROR", status(410, "Expired", f"too old resource version: {sent}"))
                            return response
                        sent = await self._send_since(response, sent, selected=selected)
        except TimeoutError:
            if bookmarks and (self.needless_bookmarks or sent > begun):
                await _send(response, "BOOKMARK", {"kind": self._kind, "metadata": {"resourceVersion": str(sent)}})
        return response

    @asynccontextmanager
    async def _limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError at the end of a watch."""
        async with asyncio.timeout(seconds) as limit:
            self._open.add(limit)
            try:
                yield
            finally:
                self._open.discard(limit)

    async def _send_since(self, response: web.StreamResponse, sent: int, *, selected: bool) -> int:
        """Sends events newer than `sent`; returns the version of the last event."""
        if self._events and self._events[-1].version > sent:
            await self._delay()
        for event in [event for event in self._events if event.version > sent]:
            if selected:
                await _send(response, event.kind, event.item)
            sent = event.version
        return sent


async def _send(response: web.StreamResponse, kind: str, item: Mapping[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
