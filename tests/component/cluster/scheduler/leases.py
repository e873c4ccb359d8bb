"""What two replicas need of the API server besides the simulated one: Leases, and the pods of a namespace by label."""

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.cluster_api import ClusterApiServer

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class Leases:
    """`document` is the only Lease (None: there is none). While `lost` is set no request gets an answer; while `empty` is set the list of
    pods is answered by an empty object."""

    def __init__(self, sim: ClusterApiServer) -> None:
        self.document: dict[str, Any] | None = None
        self.lost = self.empty = False
        self._sim, self._version = sim, 0
        sim.routes += [
            web.post(_LEASES, self._create),
            web.get(f"{_LEASES}/{{name}}", self._get),
            web.patch(f"{_LEASES}/{{name}}", self._patch),
            web.get("/api/v1/namespaces/{namespace}/pods", self._pods),
        ]

    @property
    def holder(self) -> str:
        return str(self.document["spec"].get("holderIdentity")) if self.document is not None else ""

    def labelled(self, label: str) -> list[str]:
        pods = self._sim._pods.items.values()
        return sorted(each["metadata"]["name"] for each in pods if label in each["metadata"].get("labels", {}))

    async def _create(self, request: web.Request) -> web.Response:
        await self._answerable()
        if self.document is not None:
            return web.json_response({"message": "it exists already"}, status=409)
        return self._store(await request.json(), status=201)

    async def _get(self, _: web.Request) -> web.Response:
        await self._answerable()
        return web.json_response(self.document) if self.document is not None else web.json_response({}, status=404)

    async def _patch(self, request: web.Request) -> web.Response:
        await self._answerable()
        patch = await request.json()
        if self.document is None:
            return web.json_response({}, status=404)
        if patch["metadata"]["resourceVersion"] != self.document["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified"}, status=409)
        return self._store({"metadata": self.document["metadata"], "spec": {**self.document["spec"], **patch["spec"]}})

    async def _pods(self, request: web.Request) -> web.Response:
        items = [{"metadata": {"name": name}} for name in self.labelled(request.query["labelSelector"])]
        return web.json_response({} if self.empty else {"kind": "PodList", "items": items})

    async def _answerable(self) -> None:
        while self.lost:  # noqa: ASYNC110 (a flag of the test)
            await asyncio.sleep(0.01)

    def _store(self, document: dict[str, Any], *, status: int = 200) -> web.Response:
        self._version += 1
        document = json.loads(json.dumps(document))
        document["metadata"]["resourceVersion"] = str(self._version)
        self.document = document
        return web.json_response(document, status=status)
