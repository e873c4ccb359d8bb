"""ResourceSlices and ResourceClaims of the simulated API server."""

import asyncio
import json
from collections import deque
from typing import Any

from aiohttp import web

from gpumgr.kube.pods import parse_quantity
from gpumgr.kubelet.slices import SLICES, slice_name
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import WatchedObjects, failure

Json = dict[str, Any]
_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"


class Resources:
    """`without`: feature gates that are off. `answers` replace the ordinary ones, one POST or PUT each (None: the ordinary one).
    `writes`: method and slice (a DELETE: its name), without dry runs; `probes` counts these. `claims`: (namespace, name) -> object."""

    def __init__(self, sim: SimApiServer, node: str = "node-1") -> None:
        self._name = slice_name(node)
        self.without: set[str] = set()
        self.answers: deque[web.Response | None] = deque()
        self.writes: list[tuple[str, Any]] = []
        self.probes = 0
        self.claims: dict[tuple[str, str], Json] = {}
        self.claim_answers: deque[web.Response] = deque()
        self._slices, self._number = WatchedObjects("ResourceSlice", self._delay), 0
        self._sim, self._events = sim, True
        sim.routes += [
            web.get(SLICES, self._list),
            web.post(SLICES, self._post),
            web.get(f"{SLICES}/{{name}}", self._get),
            web.put(f"{SLICES}/{{name}}", self._put),
            web.delete(f"{SLICES}/{{name}}", self._delete),
            web.get(_CLAIMS, self._claim),
        ]

    def named(self, name: str) -> Json | None:
        return next((each for each in self._slices.items.values() if each["metadata"]["name"] == name), None)

    def put(self, item: Json) -> Json:
        """Stores it as the real server does: quantities are spelled anew, taints dated, fields without their gate dropped."""
        stored: Json = json.loads(json.dumps(item))
        self._number += 1
        stored["metadata"].setdefault("uid", f"slice-{self._number}")
        for device in stored["spec"]["devices"]:
            self._store(device)
        self._slices.put(stored)
        return stored

    def remove(self, name: str) -> None:
        found = self.named(name)
        assert found is not None
        self._slices.remove(found["metadata"]["uid"])

    def send_events(self, sent: bool) -> None:
        """False: watches wait until they are cut."""
        self._events = sent

    def forget(self) -> None:
        self._slices.forget()

    async def _delay(self) -> None:
        await self._sim._delay()
        if not self._events:
            await asyncio.Event().wait()

    def _store(self, device: Json) -> None:
        if "DRAConsumableCapacity" in self.without:
            device.pop("allowMultipleAllocations", None)
        for capacity in device["capacity"].values():
            if "DRAConsumableCapacity" in self.without:
                capacity.pop("requestPolicy", None)
            policy = capacity.get("requestPolicy", {})
            for holder in (capacity, policy, policy.get("validRange", {})):
                holder |= {key: _spelled(value) for key, value in holder.items() if isinstance(value, str)}
        taints = device.pop("taints", [])
        if taints and "DRADeviceTaints" not in self.without:
            device["taints"] = [{**taint, "timeAdded": "2026-11-01T10:00:00Z"} for taint in taints]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"metadata.name={self._name}"
        if "watch" in request.query:
            return await self._slices.watch(request)
        return self._slices.list()

    async def _post(self, request: web.Request) -> web.Response:
        item = await request.json()
        if "resource.k8s.io/v1" in self.without:
            return failure(404, "NotFound", "the server could not find the requested resource")
        if request.query.get("dryRun") == "All":
            self.probes += 1
            for device in item["spec"]["devices"]:
                self._store(device)
            return web.json_response(item, status=201)
        self.writes.append(("POST", item))
        if self.answers and (answer := self.answers.popleft()) is not None:
            return answer
        if self.named(item["metadata"]["name"]) is not None:
            return failure(409, "AlreadyExists", "it exists already")
        return web.json_response(self.put(item), status=201)

    async def _get(self, request: web.Request) -> web.Response:
        found = self.named(request.match_info["name"])
        return web.json_response(found) if found is not None else failure(404, "NotFound", "not found")

    async def _put(self, request: web.Request) -> web.Response:
        item = await request.json()
        self.writes.append(("PUT", item))
        if self.answers and (answer := self.answers.popleft()) is not None:
            return answer
        if (found := self.named(request.match_info["name"])) is None:
            return failure(404, "NotFound", "not found")
        if item["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return failure(409, "Conflict", "the object has been modified")
        item["metadata"]["uid"] = found["metadata"]["uid"]
        return web.json_response(self.put(item))

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.writes.append(("DELETE", name))
        if self.named(name) is None:
            return failure(404, "NotFound", "not found")
        self.remove(name)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _claim(self, request: web.Request) -> web.Response:
        if self.claim_answers:
            return self.claim_answers.popleft()
        found = self.claims.get((request.match_info["namespace"], request.match_info["name"]))
        return web.json_response(found) if found is not None else failure(404, "NotFound", "resourceclaims not found")


def _spelled(quantity: str) -> str:
    value = parse_quantity(quantity)
    for shift, suffix in ((30, "Gi"), (20, "Mi")):
        if value >> shift << shift == value:
            return f"{value >> shift}{suffix}"
    return str(value)
