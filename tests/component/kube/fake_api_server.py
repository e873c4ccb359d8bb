"""An API server on loopback: lists pods in pages, watches them with resource versions, and misbehaves on demand."""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def pod(name: str, uid: str, cores: str | None = "10", phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    """The API server's JSON of a pod with one container."""
    limits = {"cpu": "1", **({"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": "4"} if cores else {})}
    return {
        "metadata": {"namespace": "default", "name": name, "uid": uid, "creationTimestamp": "2026-03-01T10:00:00Z", **metadata},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


def status(code: int, text: str, headers: dict[str, str] | None = None) -> Answer:
    """Answers once with an HTTP error."""

    async def answer(_: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = {"kind": "Status", "code": code, "message": text}
        return web.json_response(body, status=code, headers=headers)

    return answer


def raw(*parts: bytes) -> Answer:
    """Answers once with a stream of these bytes, then ends it cleanly."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return answer


def cut(*parts: bytes) -> Answer:
    """Answers once with these bytes, then resets the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await raw(*parts)(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def silent(*parts: bytes) -> Answer:
    """Answers once with a stream of these bytes that does not end."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await raw(*parts)(request)
        await asyncio.Event().wait()
        return response

    return answer


async def lost(request: web.Request) -> web.StreamResponse:
    """The request arrived; its answer never does. aiohttp itself repeats such a request once."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def listed(*items: str) -> str:
    """A list of objects, each as JSON."""
    return f'{{"metadata": {{"resourceVersion": "5"}}, "items": [{", ".join(items)}]}}'


def event(kind: str, item: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


class FakeApiServer:
    """`lists`, `watches`, `deletions` and `writes` are answers that replace the ordinary one, one request each. `seen` are the queries so
    far, `written` the method, path and body of each POST and PATCH. `texts`: objects by the path of their list, also in place of
    the pods; their watches are silent. For a Node it answers HTML. `token`: the only one that it accepts."""

    def __init__(self) -> None:
        self.version = 1
        self.pods: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, bytes]] = []
        self.oldest = 0
        self.page_size = 100
        self.lists: deque[Answer] = deque()
        self.watches: deque[Answer] = deque()
        self.deletions: deque[Answer] = deque()
        self.writes: deque[Answer] = deque()
        self.written: list[tuple[str, str, dict[str, Any]]] = []
        self.seen: list[dict[str, str]] = []
        self.texts: dict[str, Sequence[str]] = {}
        self.token: str | None = None
        self.tokens: list[str] = []
        self.deleted: list[tuple[str, dict[str, Any]]] = []
        self.changed = asyncio.Condition()
        self._ending: set[asyncio.Event] = set()
        self.url = ""

    async def start(self, tls: ssl.SSLContext | None = None) -> web.AppRunner:
        app = web.Application()
        app.router.add_delete("/api/v1/namespaces/{namespace}/pods/{name}", self._delete)
        app.router.add_get("/api/v1/nodes/{name}", raw(b"<html>"))
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._write)
        app.router.add_patch("/{path:.*}", self._write)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    # -- for tests ---------------------------------------------------------------------------------------------------------

    async def put(self, item: dict[str, Any]) -> None:
        kind = "MODIFIED" if item["metadata"]["uid"] in self.pods else "ADDED"
        self.pods[item["metadata"]["uid"]] = item
        await self._record(kind, item)

    async def remove(self, uid: str) -> None:
        await self._record("DELETED", self.pods.pop(uid))

    async def bookmark(self) -> None:
        await self._record("BOOKMARK", {"metadata": {}})

    async def expire_history(self) -> None:
        """Expires all earlier versions and ends the running watches."""
        self.history.clear()
        self.version += 1
        self.oldest = self.version
        await self.end_watches()

    async def end_watches(self) -> None:
        for ending in self._ending:
            ending.set()
        async with self.changed:
            self.changed.notify_all()

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(wanted)

    def count(self, *, watch: bool) -> int:
        return sum(("watch" in query) == watch for query in self.seen)

    # -- the server --------------------------------------------------------------------------------------------------------

    async def _record(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, event(kind, item)))
        async with self.changed:
            self.changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.seen.append(query)
        self.tokens.append(request.headers.get("Authorization", ""))
        async with self.changed:
            self.changed.notify_all()
        if self.token is not None and self.tokens[-1] != f"Bearer {self.token}":
            return await status(401, "expired")(request)
        if request.path != "/api/v1/pods" or request.path in self.texts:
            text = listed(*self.texts.get(request.path, ()))
            return await silent()(request) if "watch" in query else web.Response(text=text, content_type="application/json")
        scripted = self.watches if "watch" in query else self.lists
        if scripted:
            return await scripted.popleft()(request)
        return await self._watch(request) if "watch" in query else self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        start = int(query.get("continue", "0"))
        end = start + min(self.page_size, int(query.get("limit", "500")))
        items = list(self.pods.values())
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(items) else {})
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self.oldest:
            return await status(410, "too old resource version")(request)
        response = web.StreamResponse()
        await response.prepare(request)
        ending = asyncio.Event()
        self._ending.add(ending)
        while not ending.is_set():
            for number, line in self.history:
                if number > version:
                    version = number
                    await response.write(line)
            async with self.changed:
                news = self.history and self.history[-1][0] > version
                if not news and not ending.is_set():
                    await self.changed.wait()
        self._ending.discard(ending)
        return response

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        self.deleted.append((request.path, await request.json()))
        async with self.changed:
            self.changed.notify_all()
        if self.deletions:
            return await self.deletions.popleft()(request)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _write(self, request: web.Request) -> web.StreamResponse:
        self.written.append((request.method, request.path, await request.json()))
        self.tokens.append(request.headers.get("Authorization", ""))
        async with self.changed:
            self.changed.notify_all()
        if self.writes:
            return await self.writes.popleft()(request)
        return web.json_response({"kind": "Status", "status": "Success"})
