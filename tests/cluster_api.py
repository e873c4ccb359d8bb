"""The simulated API server with what the scheduler and the claims controller use: nodes, quotas, DRA, bindings, JSON patches of pods."""

import json
from collections.abc import Awaitable, Callable
from functools import reduce
from operator import getitem
from typing import Any

from aiohttp import web

from gpumgr.sim.apiserver import SimApiServer, conflict, not_found
from gpumgr.sim.apiserver_objects import Document, WatchedObjects, failure, merge

DRA_API = "/apis/resource.k8s.io/v1"
_DRA = {"resourceclaims": "ResourceClaim", "resourceclaimtemplates": "ResourceClaimTemplate", "resourceslices": "ResourceSlice"}
_JSON_PATCH = "application/json-patch+json"


class ClusterApiServer(SimApiServer):
    """With `lose_bindings` a binding takes effect, but its answer does not arrive. `bind_hook` is awaited with False before a binding takes
    effect, and with True afterwards; a response that it returns is sent at once. `requests` also has "bind"."""

    def __init__(self, node_name: str, **options: Any) -> None:
        super().__init__(node_name, **options)
        self.lose_bindings = False
        self.bind_hook: Callable[[bool], Awaitable[web.Response | None]] | None = None
        names = {"nodes": "Node", "configmaps": "ConfigMap", "resourcequotas": "ResourceQuota", **_DRA}
        self._watched |= {kind: WatchedObjects(name, self._delay) for kind, name in names.items()}
        pod = "/api/v1/namespaces/{namespace}/pods/{name}"
        self.routes += [
            web.get("/api/v1/namespaces/{namespace}/configmaps", self._list_or_watch),
            *(web.get(f"{DRA_API}/{kind}", self._list_or_watch) for kind in _DRA),
            web.post(f"{pod}/binding", self._bind),
        ]

    async def _patch(self, request: web.Request) -> web.Response:
        if request.content_type != _JSON_PATCH:
            return await super()._patch(request)
        if refused := self.written.refused(request, "pod", "patch", "pods", _JSON_PATCH):
            return refused
        if (pod := self._named(request)) is None:
            return not_found(request)
        return self._json_patch(pod, await request.json())

    def objects(self, kind: str) -> WatchedObjects:
        """The objects of this resource, such as "resourceclaims", in all namespaces."""
        return self._watched[kind]

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

    async def _bind(self, request: web.Request) -> web.Response:
        """Sets the node and merges the annotations, which the real server does not validate here either."""
        if refused := self.written.refused(request, "bind", "create", "pods/binding"):
            return refused
        if self.bind_hook is not None and (answer := await self.bind_hook(False)) is not None:
            return answer
        if (pod := self._named(request)) is None:
            return not_found(request)
        binding = await request.json()
        expected, uid = binding["metadata"].get("uid") or pod["metadata"]["uid"], pod["metadata"]["uid"]
        if expected != uid:
            return conflict(expected, uid)
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
