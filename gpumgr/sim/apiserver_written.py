"""What clients write to the stand-in for the API server: events, annotations of the node, and questions about their rights."""

from collections.abc import Collection, Mapping
from typing import Any

from aiohttp import web

Document = dict[str, Any]
#: (verb, resource), the resource with its subresource: ("create", "pods/eviction").
Right = tuple[str, str]


class Written:
    """`events` by (namespace, name); `annotations` are the node's. Adds "event", "recount", "annotate" and "review" to `requests`."""

    def __init__(self, node_name: str, requests: list[str], forbidden: Collection[Right]) -> None:
        self.events: dict[tuple[str, str], Document] = {}
        self.annotations: dict[str, str] = {}
        self._node_name, self._requests, self._forbidden = node_name, requests, forbidden

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/api/v1/namespaces/{namespace}/events", self._create_event)
        router.add_patch("/api/v1/namespaces/{namespace}/events/{name}", self._patch_event)
        router.add_patch("/api/v1/nodes/{name}", self._patch_node)
        router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)

    async def _create_event(self, request: web.Request) -> web.Response:
        if refused := self._refused(request, "event", "create", "events"):
            return refused
        event: Document = await request.json()
        namespace = request.match_info["namespace"]
        key = (namespace, event["metadata"]["name"])
        if event["involvedObject"].get("namespace") != namespace:
            return failure(422, "Invalid", "involvedObject.namespace: does not match event.namespace")
        if key in self.events:
            return failure(409, "AlreadyExists", f'events "{key[1]}" already exists')
        self.events[key] = event
        return web.json_response(event, status=201)

    async def _patch_event(self, request: web.Request) -> web.Response:
        if refused := self._refused(request, "recount", "patch", "events"):
            return refused
        event = self.events.get((request.match_info["namespace"], request.match_info["name"]))
        if event is None:
            return failure(404, "NotFound", "event not found")
        merge(event, await request.json())
        return web.json_response(event)

    async def _patch_node(self, request: web.Request) -> web.Response:
        if refused := self._refused(request, "annotate", "patch", "nodes"):
            return refused
        if request.match_info["name"] != self._node_name:
            return failure(404, "NotFound", f'nodes "{request.match_info["name"]}" not found')
        node: Document = {"kind": "Node", "metadata": {"name": self._node_name, "annotations": self.annotations}}
        merge(node, await request.json())
        return web.json_response(node)

    async def _review(self, request: web.Request) -> web.Response:
        self._requests.append("review")
        review: Document = await request.json()
        asked = review["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return web.json_response({**review, "status": {"allowed": (asked["verb"], resource) not in self._forbidden}}, status=201)

    def _refused(self, request: web.Request, word: str, verb: str, resource: str) -> web.Response | None:
        self._requests.append(word)
        if (verb, resource) in self._forbidden:
            return failure(403, "Forbidden", f"{resource} is forbidden: the client cannot {verb} resource {resource}")
        if verb == "patch" and request.content_type != "application/merge-patch+json":
            return failure(415, "UnsupportedMediaType", f"no merge patch: {request.content_type}")
        return None


def merge(target: Document, patch: Mapping[str, Any]) -> None:
    """JSON merge patch (RFC 7386), in place."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value


def status(code: int, reason: str, message: str) -> Document:
    """A metav1.Status of a failure."""
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}


def failure(code: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(status(code, reason, message), status=code, headers=headers)
