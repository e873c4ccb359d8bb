"""A simulated API server for the pods of one node: lists, watches, patches, deletions and evictions. Events, the node and access reviews
are in `apiserver_objects`.

A watch gets every change after its resource version, in order. If this version is older than the history, the watch gets an ERROR event,
410 Expired. Changes during an outage are visible when the server is back, at the same address.
"""

import asyncio
import json
import socket
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import yaml
from aiohttp import web

from gpumgr.sim.apiserver_objects import Document, Right, WatchedObjects, Written, failure, merge, problem_of
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PENDING: Final = PodStatus(phase="Pending")


def reserve_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1. Until it is closed, the kernel gives the port to no other program, and a server that sets
    SO_REUSEADDR can listen on it any number of times."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


class SimApiServer:
    """Serves on loopback between `start` and `stop` (or as an async context manager).

    `delay_seconds` delays every answer and event. `routes` are served in addition. `on_delete` gets the UID of a pod that a client deleted
    or evicted. `requests` records "list", "watch", "read", "delete", "evict", "pod" (a patch of a pod), and what `Written` lists.
    `forbidden`: rights, such as ("create", "pods/eviction"), that clients lack. `protected`: UIDs of pods with a PodDisruptionBudget that
    allows no eviction."""

    def __init__(self, node_name: str, *, on_delete: Callable[[str], None] = lambda _uid: None) -> None:
        self.node_name = node_name
        self.delay_seconds = 0.0
        self.routes: list[web.RouteDef] = []
        self.requests: list[str] = []
        self.forbidden: set[Right] = set()
        self.protected: set[str] = set()
        self.written = Written(node_name, self.requests, self.forbidden)
        self._on_delete = on_delete
        self._pods = WatchedObjects("Pod", self._delay)
        self._watched = {"pods": self._pods}
        bound = reserve_port()
        weakref.finalize(self, bound.close)
        self._port: int = bound.getsockname()[1]
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
        """It never changes, and no other program gets the port while the server is stopped."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Starts to listen, each time at the same port."""
        app = web.Application(middlewares=[self._tracked])
        for resource in self._watched:
            app.router.add_get(f"/api/v1/{resource}", self._list_or_watch)
        app.router.add_delete("/api/v1/namespaces/{namespace}/pods/{name}", self._delete)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch)
        app.router.add_post("/api/v1/namespaces/{namespace}/pods/{name}/eviction", self._evict)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        self.written.add_routes(app.router)
        app.router.add_routes(self.routes)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()

    async def stop(self) -> None:
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

    def put_document(self, pod: Document) -> None:
        """Creates or replaces a pod on any node, or on none."""
        self._pods.put(pod)

    def put(self, pod: SimPod, status: PodStatus = _PENDING) -> None:
        """Sets the pod's status; a pod with a new UID is created."""
        before = self._pods.items.get(pod.uid)
        created = before["metadata"]["creationTimestamp"] if before else datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = _document_of(pod, status, self.node_name, created)
        document["metadata"]["annotations"] = before["metadata"]["annotations"] if before else {}
        self._pods.put(document)

    def remove(self, uid: str) -> None:
        self._pods.remove(uid)

    def annotations(self, uid: str) -> Mapping[str, str]:
        annotations: dict[str, str] = self._pods.items[uid]["metadata"]["annotations"]
        return annotations

    def forget(self) -> None:
        """Drops the history of changes, so that no watch can start from an earlier version."""
        for watched in self._watched.values():
            watched.forget()

    def end_watches(self) -> None:
        """Sends bookmarks and ends the open watches, as at their timeout."""
        for watched in self._watched.values():
            watched.end_watches()

    @web.middleware
    async def _tracked(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
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
        """A UID in the patch is a precondition, like every immutable field."""
        if refused := self.written.refused(request, "pod", "patch", "pods"):
            return refused
        if (pod := self._named(request)) is None:
            return not_found(request)
        patch = await request.json()
        metadata = pod["metadata"]
        if (expected := patch["metadata"].get("uid", metadata["uid"])) != metadata["uid"]:
            return conflict(expected, metadata["uid"])
        changed = json.loads(json.dumps(pod))
        merge(changed, patch)
        if problem := problem_of(changed["metadata"]):
            return failure(422, "Invalid", problem)
        self._pods.put(changed)
        return web.json_response(changed)

    async def _get_pod(self, request: web.Request) -> web.Response:
        if refused := self.written.refused(request, "read", "get", "pods"):
            return refused
        pod = self._named(request)
        return web.json_response(pod) if pod is not None else not_found(request)

    def _named(self, request: web.Request) -> Document | None:
        """The pod with this name (of two, the later one), or None."""
        key = (request.match_info["namespace"], request.match_info["name"])
        named = [pod for pod in self._pods.items.values() if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == key]
        return named[-1] if named else None

    def _delete_or_evict(
        self, request: web.Request, preconditions: Document | None, protected: Collection[str] = frozenset()
    ) -> web.Response:
        """`protected`: UIDs of pods that may not be evicted now."""
        if (pod := self._named(request)) is None:
            return not_found(request)
        uid = pod["metadata"]["uid"]
        if (expected := (preconditions or {}).get("uid", uid)) != uid:
            return conflict(expected, uid)
        if uid in protected:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            return failure(429, "TooManyRequests", message, {"Retry-After": "10"})
        self.remove(uid)
        self._on_delete(uid)
        return web.json_response(pod)

    def _selected(self, request: web.Request) -> bool:
        """Whether the answer has the objects: all of them, or none if the field selector names another node."""
        selector = request.query.get("fieldSelector", "").split(",")[0]
        return not selector.startswith("spec.nodeName=") or selector == f"spec.nodeName={self.node_name}"

    async def _delay(self) -> None:
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)


def _document_of(pod: SimPod, status: PodStatus, node: str, created: str) -> Document:
    said = {"phase": status.phase, "reason": status.reason, "message": status.message}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid, "creationTimestamp": created},
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


def not_found(request: web.Request) -> web.Response:
    return failure(404, "NotFound", f'pods "{request.match_info["name"]}" not found')


def conflict(expected: str, uid: str) -> web.Response:
    return failure(409, "Conflict", f"Precondition failed: UID in precondition: {expected}, UID in object meta: {uid}")
