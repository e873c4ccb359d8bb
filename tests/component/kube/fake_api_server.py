"""The simulated API server, misbehaving on demand."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from gpumgr.sim.apiserver import SimApiServer

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


class FakeApiServer(SimApiServer):
    """`lists`, `watches`, `deletions` and `writes` are answers that replace the ordinary one, one request each. The ordinary answer to a
    deletion or write is success, without effect. `seen`: the queries so far; `sent`: method, path and body of each POST and PATCH;
    `deleted`: path and body of each DELETE. `texts`: objects by the path of their list, also in place of the pods; their watches are
    silent. `token`: the only one that it accepts; `tokens`: all that it got."""

    def __init__(self) -> None:
        super().__init__("node-1")
        self.lists: deque[Answer] = deque()
        self.watches: deque[Answer] = deque()
        self.deletions: deque[Answer] = deque()
        self.writes: deque[Answer] = deque()
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.seen: list[dict[str, str]] = []
        self.texts: dict[str, Sequence[str]] = {}
        self.token: str | None = None
        self.tokens: list[str] = []
        self.deleted: list[tuple[str, dict[str, Any]]] = []

    def bookmark(self) -> None:
        self._pods._record("BOOKMARK", {"metadata": {}})

    def expire_history(self) -> None:
        """Expires all earlier versions and ends the running watches."""
        self.bookmark()
        self.forget()

    def count(self, *, watch: bool) -> int:
        return sum(("watch" in query) == watch for query in self.seen)

    @web.middleware
    async def _tracked(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        if request.method == "GET":
            self.seen.append(dict(request.query))
            other = request.path in self.texts or request.path != "/api/v1/pods"
            answers, ordinary = self.watches if "watch" in request.query else self.lists, self._other if other else handler
        elif request.method == "DELETE":
            self.deleted.append((request.path, await request.json()))
            answers, ordinary = self.deletions, status(200, "done")
        else:
            self.sent.append((request.method, request.path, await request.json()))
            answers, ordinary = self.writes, status(200, "done")
        if self.token is not None and self.tokens[-1] != f"Bearer {self.token}":
            answers, ordinary = deque(), status(401, "expired")
        return await super()._tracked(request, answers.popleft() if answers else ordinary)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        text = listed(*self.texts.get(request.path, ()))
        return await silent()(request) if "watch" in request.query else web.Response(text=text, content_type="application/json")
