"""The objects of the simulated API server: lists and watches of one kind, and what clients write (events, the node, access reviews).

Like Kubernetes' API validation, the server refuses labels and annotations that exceed the limits, and an event in another namespace than
the object that it is about.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiohttp import web

from gpumgr.common.aio import LatestValue

Document = dict[str, Any]
#: (verb, resource or resource/subresource), such as ("create", "pods/eviction").
Right = tuple[str, str]

MAX_ANNOTATIONS_BYTES: Final = 256 << 10
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PREFIX: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
MERGE: Final = "application/merge-patch+json"

_STRATEGIC: Final = "application/strategic-merge-patch+json"


class Written:
    """What clients write. Key of `events`: (namespace, name). `annotations`, `labels` and `conditions` (by type) belong to the node.
    `managers`: other field managers of the node.

    Each request is appended to `requests` as "event" (a new one), "recount" (a patch of an event), "annotate", "label", "condition", "node"
    (a read) or "review".
    """

    def __init__(self, node_name: str, requests: list[str], forbidden: Collection[Right]) -> None:
        self.events: dict[tuple[str, str], Document] = {}
        self.annotations: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.conditions: dict[str, Document] = {}
        self.managers: list[str] = []
        self._node_name, self._requests, self._forbidden = node_name, requests, forbidden

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/api/v1/namespaces/{namespace}/events", self._create_event)
        router.add_patch("/api/v1/namespaces/{namespace}/events/{name}", self._patch_event)
        router.add_get("/api/v1/nodes/{name}", self._get_node)
        router.add_patch("/api/v1/nodes/{name}", self._patch_node)
        router.add_patch("/api/v1/nodes/{name}/status", self._patch_status)
        router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)

    # -- events ------------------------------------------------------------------------------------------------------------

    async def _create_event(self, request: web.Request) -> web.Response:
        if refused := self.refused(request, "event", "create", "events"):
            return refused
        event: Document = await request.json()
        namespace = request.match_info["namespace"]
        key = (namespace, event["metadata"]["name"])
        if (event["involvedObject"].get("namespace") or "default") != namespace:
            return failure(422, "Invalid", "involvedObject.namespace: does not match event.namespace")
        if key in self.events:
            return failure(409, "AlreadyExists", f'events "{key[1]}" already exists')
        self.events[key] = event
        return web.json_response(event, status=201)

    async def _patch_event(self, request: web.Request) -> web.Response:
        if refused := self.refused(request, "recount", "patch", "events"):
            return refused
        event = self.events.get((request.match_info["namespace"], request.match_info["name"]))
        if event is None:
            return failure(404, "NotFound", "event not found")
        merge(event, await request.json())
        return web.json_response(event)

    # -- the node ----------------------------------------------------------------------------------------------------------

    async def _get_node(self, request: web.Request) -> web.Response:
        if refused := self.refused(request, "node", "get", "nodes"):
            return refused
        return self._unknown(request) or web.json_response(self._node())

    async def _patch_node(self, request: web.Request) -> web.Response:
        patch: Document = await request.json()
        word = "label" if "labels" in patch["metadata"] else "annotate"
        if refused := self.refused(request, word, "patch", "nodes") or self._unknown(request):
            return refused
        node = self._node()
        merge(node, patch)
        if problem := problem_of(node["metadata"]):
            return failure(422, "Invalid", problem)
        self.annotations, self.labels = node["metadata"]["annotations"], node["metadata"]["labels"]
        return web.json_response(node)

    async def _patch_status(self, request: web.Request) -> web.Response:
        """Merges conditions by `type`; `$patch: delete` removes one."""
        if refused := self.refused(request, "condition", "patch", "nodes/status", _STRATEGIC) or self._unknown(request):
            return refused
        for condition in (await request.json())["status"]["conditions"]:
            if condition.get("$patch") == "delete":
                self.conditions.pop(condition["type"], None)
                continue
            merge(self.conditions.setdefault(condition["type"], {}), condition)
        return web.json_response(self._node())

    def _node(self) -> Document:
        managed = [{"manager": manager, "operation": "Update"} for manager in self.managers]
        return {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {
                "name": self._node_name,
                "uid": f"uid-{self._node_name}",
                "annotations": dict(self.annotations),
                "labels": dict(self.labels),
                "managedFields": managed,
            },
            "status": {"conditions": list(self.conditions.values())},
        }

    def _unknown(self, request: web.Request) -> web.Response | None:
        name = request.match_info["name"]
        return None if name == self._node_name else failure(404, "NotFound", f'nodes "{name}" not found')

    # -- rights ------------------------------------------------------------------------------------------------------------

    async def _review(self, request: web.Request) -> web.Response:
        self._requests.append("review")
        review: Document = await request.json()
        asked = review["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return web.json_response({**review, "status": {"allowed": (asked["verb"], resource) not in self._forbidden}}, status=201)

    def refused(
        self, request: web.Request, word: str, verb: str, resource: str, content_type: str = MERGE
    ) -> web.Response | None:
        self._requests.append(word)
        if (verb, resource) in self._forbidden:
            return failure(403, "Forbidden", f"{resource} is forbidden: the client cannot {verb} resource {resource}")
        if verb == "patch" and request.content_type != content_type:
            return failure(415, "UnsupportedMediaType", f"{request.content_type} is not supported here; use {content_type}")
        return None


def problem_of(metadata: Mapping[str, Any]) -> str | None:
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    for key in (*annotations, *labels):
        prefix, _, name = key.rpartition("/")
        if not _NAME.fullmatch(name) or (prefix and not _PREFIX.fullmatch(prefix)):
            return f"{key!r} is no qualified name"
    for key, value in labels.items():
        if value and not _NAME.fullmatch(value):
            return f"the value {value!r} of label {key} is invalid"
    if not all(isinstance(value, str) for value in annotations.values()):
        return "the values of annotations must be strings"
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    return f"annotations of {size} bytes are too long" if size > MAX_ANNOTATIONS_BYTES else None


def merge(target: Document, patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            below = target[key] if isinstance(target.get(key), dict) else {}
            merge(below, value)
            target[key] = below
        else:
            target[key] = value


def status(code: int, reason: str, message: str) -> Document:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}


def failure(code: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(status(code, reason, message), status=code, headers=headers)


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    kind: str
    item: Document


class WatchedObjects:
    """`items`: UID -> object; change it only with `put` and `remove`. `delay` is awaited before events are sent."""

    def __init__(self, kind: str, delay: Callable[[], Awaitable[None]]) -> None:
        self.items: dict[str, Document] = {}
        self._kind, self._delay = kind, delay
        self._events: list[_Event] = []
        self._forgotten = 0
        self._version = LatestValue(1)
        self._open: set[asyncio.Timeout] = set()
        #: Whether a watch without changes also ends with a bookmark. Kubernetes' API server sends no bookmark in this case.
        self.needless_bookmarks = False

    def put(self, document: Document) -> None:
        uid = document["metadata"]["uid"]
        event = "MODIFIED" if uid in self.items else "ADDED"
        self.items[uid] = document
        self._record(event, document)

    def remove(self, uid: str) -> None:
        self._record("DELETED", self.items.pop(uid))

    def forget(self) -> None:
        self._forgotten = self._version.value
        self._events.clear()

    def end_watches(self) -> None:
        for each in self._open:
            each.reschedule(asyncio.get_running_loop().time())

    def _record(self, kind: str, document: Document) -> None:
        version = self._version.value + 1
        document["metadata"]["resourceVersion"] = str(version)
        self._events.append(_Event(version=version, kind=kind, item=json.loads(json.dumps(document))))
        self._version.set(version)

    def list(self, *, selected: bool = True) -> web.Response:
        """All objects on one page. `selected` False: the request's selector selects no object."""
        items = [*self.items.values()] if selected else []
        version = str(self._version.value)
        metadata = {"resourceVersion": version}
        return web.json_response({"kind": f"{self._kind}List", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def watch(self, request: web.Request, *, selected: bool = True) -> web.StreamResponse:
        """Sends events until the request's timeout, or until its version is no longer in the history."""
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
        """Raises TimeoutError in the block after `seconds`, or when `end_watches` is called."""
        async with asyncio.timeout(seconds) as limit:
            self._open.add(limit)
            try:
                yield
            finally:
                self._open.discard(limit)

    async def _send_since(self, response: web.StreamResponse, sent: int, *, selected: bool) -> int:
        if self._events and self._events[-1].version > sent:
            await self._delay()
        for event in [event for event in self._events if event.version > sent]:
            if selected:
                await _send(response, event.kind, event.item)
            sent = event.version
        return sent


async def _send(response: web.StreamResponse, kind: str, item: Mapping[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
