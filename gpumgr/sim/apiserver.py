"""A simulated API server. It has what a node agent uses (lists, watches, patches, deletes and evicts the pods of one node), and what the
scheduler uses (lists and watches nodes, and sends bindings).

Invariants:

- Resource versions increase with every change. A watch from a version gets every later change, in order.
- A watch from a version older than the recorded history gets an ERROR event with 410 Expired, as the real server sends it.
- An outage loses nothing: changes during it are visible when the server is back at the same address.
- Requests in `forbidden` get 403, and a SelfSubjectAccessReview reports them as not allowed.

Events, the node and access reviews are in `apiserver_objects`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final, Self

import yaml
from aiohttp import web

from gpumgr.sim.apiserver_objects import JSON_PATCH, MERGE, Document, Right, WatchedObjects, Written, failure, merge, problem_of
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PENDING: Final = PodStatus(phase="Pending")


class SimApiServer:
    """Stores pods, nodes and ConfigMaps and serves them on loopback, between `start` and `stop` (or as an async context manager).

    `delay_seconds` delays every answer and every event. With `lose_bindings` a binding takes effect, but its answer does not arrive.
    `bind_hook` is awaited with False before a binding takes effect, and with True afterwards; a response that it returns is sent at once.
    `routes` are served in addition. `on_delete` is called with the UID of a pod that a client deleted or evicted. `requests` records the
    requests, as "list", "watch", "read", "bind", "delete", "evict", "pod" (a patch of a pod), and what `Written` records for events, the
    node and access reviews. `forbidden` has pairs such as ("create", "pods/eviction"). `protected` has the UIDs of pods with a
    PodDisruptionBudget that allows no eviction. `written` is what clients wrote.
    """

    def __init__(self, node_name: str, *, on_delete: Callable[[str], None] = lambda _uid: None) -> None:
        self.node_name = node_name
        self.delay_seconds = 0.0
        self.lose_bindings = False
        self.bind_hook: Callable[[bool], Awaitable[web.Response | None]] | None = None
        self.routes: list[web.RouteDef] = []
        self.requests: list[str] = []
        self.forbidden: set[Right] = set()
        self.protected: set[str] = set()
        self.written = Written(node_name, self.requests, self.forbidden)
        self._on_delete = on_delete
        kinds = {"pods": "Pod", "nodes": "Node", "configmaps": "ConfigMap"}
        self._watched = {resource: WatchedObjects(kind, self._delay) for resource, kind in kinds.items()}
        self._pods = self._watched["pods"]
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._open: dict[asyncio.Task[Any], web.Request] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- life cycle --------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL is known after the first `start`, and does not change afterwards."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Starts to listen, after a `stop` at the same port as before."""
        app = web.Application(middlewares=[self._tracked])
        for resource in self._watched:
            app.router.add_get(f"/api/v1/{resource}", self._list_or_watch)
        app.router.add_get("/api/v1/namespaces/{namespace}/configmaps", self._list_or_watch)
        app.router.add_delete("/api/v1/namespaces/{namespace}/pods/{name}", self._delete)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch)
        app.router.add_post("/api/v1/namespaces/{namespace}/pods/{name}/eviction", self._evict)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        app.router.add_post("/api/v1/namespaces/{namespace}/pods/{name}/binding", self._bind)
        self.written.add_routes(app.router)
        app.router.add_routes(self.routes)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening and cuts the open requests. The pods stay."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            for request in list(self._open.values()):
                if request.transport is not None:
                    request.transport.abort()
            if self._open:
                await asyncio.wait(list(self._open))
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig for this server to `path`."""
        name = "sim"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    # -- objects -----------------------------------------------------------------------------------------------------------

    def put_node(self, document: Document) -> None:
        """Creates or replaces a node of the list of nodes. It is independent of the one node in `written`, which an agent reads and
        patches."""
        self._watched["nodes"].put(document)

    def remove_node(self, uid: str) -> None:
        """Raises KeyError if it does not exist."""
        self._watched["nodes"].remove(uid)

    def put_configmap(self, document: Document) -> None:
        """Creates or replaces a ConfigMap. A list has the ConfigMaps of all namespaces, also if the request names one."""
        self._watched["configmaps"].put(document)

    def remove_configmap(self, uid: str) -> None:
        """Raises KeyError if it does not exist."""
        self._watched["configmaps"].remove(uid)

    def put_document(self, pod: Document) -> None:
        """Creates or replaces a pod on any node, or on none."""
        self._pods.put(pod)

    def put(self, pod: SimPod, status: PodStatus = _PENDING, *, controlled: bool = False) -> None:
        """Sets the pod's status; a pod with a new UID is created. `controlled`: a ReplicaSet owns it."""
        before = self._pods.items.get(pod.uid)
        created = before["metadata"]["creationTimestamp"] if before else datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = _document_of(pod, status, self.node_name, created, controlled=controlled)
        document["metadata"]["annotations"] = before["metadata"]["annotations"] if before else {}
        self._pods.put(document)

    def remove(self, uid: str) -> None:
        """Removes the pod. Raises KeyError if it does not exist."""
        self._pods.remove(uid)

    def annotations(self, uid: str) -> Mapping[str, str]:
        """Annotations of a pod. Raises KeyError if it does not exist."""
        annotations: dict[str, str] = self._pods.items[uid]["metadata"]["annotations"]
        return annotations

    def forget(self) -> None:
        """Drops the history of changes: no watch can start from a version that was returned before."""
        for watched in self._watched.values():
            watched.forget()

    def end_watches(self) -> None:
        """Sends bookmarks and ends the open watches, as if their time were over."""
        for watched in self._watched.values():
            watched.end_watches()

    @web.middleware
    async def _tracked(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Keeps the request for `stop`, and delays its answer."""
        task = asyncio.current_task()
        assert task is not None, "aiohttp handles requests in tasks"
        self._open[task] = request
        try:
            await self._delay()
            return await handler(request)
        finally:
            del self._open[task]

    # -- requests ----------------------------------------------------------------------------------------------------------

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") in ("true", "1")
        verb = "watch" if watch else "list"
        resource = request.path.rpartition("/")[2]
        if refused := self.written.refused(request, verb, verb, resource):
            return refused
        objects, selected = self._watched[resource], self._selected(request)
        return await objects.watch(request, selected=selected) if watch else objects.list(selected=selected)

    async def _delete(self, request: web.Request) -> web.Response:
        if refused := self.written.refused(request, "delete", "delete", "pods"):
            return refused
        body = await request.json() if request.can_read_body else {}
        return self._delete_or_evict(request, body.get("preconditions"))

    async def _evict(self, request: web.Request) -> web.Response:
        if refused := self.written.refused(request, "evict", "create", "pods/eviction"):
            return refused
        body = await request.json()
        return self._delete_or_evict(request, (body.get("deleteOptions") or {}).get("preconditions"), protected=self.protected)

    async def _patch(self, request: web.Request) -> web.Response:
        """The UID in a patch is a precondition, like every immutable field."""
        kind = request.content_type if request.content_type == JSON_PATCH else MERGE
        if refused := self.written.refused(request, "pod", "patch", "pods", kind):
            return refused
        if (pod := self._named(request)) is None:
            return _not_found(request)
        patch = await request.json()
        if kind == JSON_PATCH:
            return self._json_patch(pod, patch)
        metadata = pod["metadata"]
        if (expected := patch["metadata"].get("uid", metadata["uid"])) != metadata["uid"]:
            return _conflict(expected, metadata["uid"])
        changed = json.loads(json.dumps(pod))
        merge(changed, patch)
        if problem := problem_of(changed["metadata"]):
            return failure(422, "Invalid", problem)
        self._pods.put(changed)
        return web.json_response(changed)

    def _json_patch(self, pod: Document, operations: list[Document]) -> web.Response:
        """RFC 6902 with only `test` and `remove`. The real server, too, answers 422 if a test fails."""
        changed = json.loads(json.dumps(pod))
        for each in operations:
            *path, last = (int(part) if part.isdecimal() else part for part in each["path"].split("/")[1:])
            try:
                place = reduce(getitem, path, changed)
                failed = each["op"] == "test" and place[last] != each["value"]
                if each["op"] == "remove":
                    del place[last]
            except (KeyError, IndexError):
                failed = True
            if failed:
                return failure(422, "Invalid", "the server rejected our request due to an error in our request")
        self._pods.put(changed)
        return web.json_response(changed)

    async def _get_pod(self, request: web.Request) -> web.Response:
        if refused := self.written.refused(request, "read", "get", "pods"):
            return refused
        pod = self._named(request)
        return web.json_response(pod) if pod is not None else _not_found(request)

    async def _bind(self, request: web.Request) -> web.Response:
        """Sets the node and merges the annotations, which the real server does not validate here either."""
        if refused := self.written.refused(request, "bind", "create", "pods/binding"):
            return refused
        if self.bind_hook is not None and (answer := await self.bind_hook(False)) is not None:
            return answer
        if (pod := self._named(request)) is None:
            return _not_found(request)
        binding = await request.json()
        expected, uid = binding["metadata"].get("uid") or pod["metadata"]["uid"], pod["metadata"]["uid"]
        if expected != uid:
            return _conflict(expected, uid)
        if pod["spec"].get("nodeName"):
            message = f'pod {pod["metadata"]["name"]} is already assigned to node "{pod["spec"]["nodeName"]}"'
            return failure(409, "Conflict", message)
        changed = json.loads(json.dumps(pod))
        changed["spec"]["nodeName"] = binding["target"]["name"]
        merge(changed["metadata"], {"annotations": binding["metadata"].get("annotations") or {}})
        self._pods.put(changed)
        if self.bind_hook is not None and (answer := await self.bind_hook(True)) is not None:
            return answer
        if self.lose_bindings and request.transport is not None:
            request.transport.abort()
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, status=201)

    def _named(self, request: web.Request) -> Document | None:
        """The pod with this name, the later one of two; None if there is none."""
        key = (request.match_info["namespace"], request.match_info["name"])
        named = [pod for pod in self._pods.items.values() if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == key]
        return named[-1] if named else None

    def _delete_or_evict(
        self, request: web.Request, preconditions: Document | None, protected: Collection[str] = frozenset()
    ) -> web.Response:
        """`protected`: UIDs of pods that may not be evicted now."""
        if (pod := self._named(request)) is None:
            return _not_found(request)
        uid = pod["metadata"]["uid"]
        if (expected := (preconditions or {}).get("uid", uid)) != uid:
            return _conflict(expected, uid)
        if uid in protected:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            return failure(429, "TooManyRequests", message, {"Retry-After": "10"})
        self.remove(uid)
        self._on_delete(uid)
        return web.json_response(pod)

    def _selected(self, request: web.Request) -> bool:
        """Whether the request is answered with all objects: its field selector names this node or no node. A request for another node gets
        none."""
        selector = request.query.get("fieldSelector", "").split(",")[0]
        return not selector.startswith("spec.nodeName=") or selector == f"spec.nodeName={self.node_name}"

    async def _delay(self) -> None:
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)


def _document_of(pod: SimPod, status: PodStatus, node: str, created: str, *, controlled: bool) -> Document:
    """The pod as a document of the API server."""
    said = {"phase": status.phase, "reason": status.reason, "message": status.message}
    owners = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": pod.name, "uid": f"rs-{pod.uid}", "controller": True}]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "creationTimestamp": created,
            **({"ownerReferences": owners} if controlled else {}),
        },
        "spec": {
            "nodeName": node,
            "initContainers": [_container(each) for each in pod.containers if each.kind != "app"],
            "containers": [_container(each) for each in pod.containers if each.kind == "app"],
        },
        "status": {key: value for key, value in said.items() if value is not None},
    }


def _container(container: SimContainer) -> Document:
    amounts = {resource: str(count) for resource, count in container.limits.items()}
    document: Document = {"name": container.name, "resources": {"limits": amounts, "requests": amounts}}
    if container.kind == "sidecar":
        document["restartPolicy"] = "Always"
    return document


def _not_found(request: web.Request) -> web.Response:
    return failure(404, "NotFound", f'pods "{request.match_info["name"]}" not found')


def _conflict(expected: str, uid: str) -> web.Response:
    return failure(409, "Conflict", f"Precondition failed: UID in precondition: {expected}, UID in object meta: {uid}")
