"""An API server with the watches and Leases of the real one, which fails on command, and checks each binding against all GPUs.

A watch ends after its `timeoutSeconds`, with a bookmark 2 s before if there was news; a version that the history lacks is answered 410.
"""

import asyncio
import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, Literal

from aiohttp import web

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION, decode_placement
from gpumgr.sim.apiserver_objects import failure
from tests.bench.big_cluster import GPU_MEBIBYTES, Json, gpu_pod, node

#: What happens to the watches: 429, 410, no event and no bookmark, or events that are late and, after a reconnect, in another order.
WatchFault = Literal["refused", "expired", "silent", "late"]
_HISTORY: Final = 20_000
_BOOKMARK_SECONDS: Final = 2.0
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class Objects:
    """Objects of one kind: `count` were there before, and `text_of` makes their JSON when they are listed; later ones are kept by UID.
    And the history of changes: version, UID, event."""

    def __init__(self, count: int = 0, text_of: Callable[[int], str] = str) -> None:
        self._count, self._text_of = count, text_of
        self.texts: dict[str, str] = {}
        self.version = 1
        self.history: deque[tuple[int, str, str]] = deque(maxlen=_HISTORY)
        self.news = asyncio.Condition()

    def page(self, first: int, limit: int) -> tuple[list[str], bool]:
        """The texts from `first` on, and whether there are more."""
        end, before = first + limit, self._count
        made = [self._text_of(number) for number in range(first, min(end, before))]
        later = islice(self.texts.values(), max(0, first - before), max(0, end - before))
        return [*made, *later], end < before + len(self.texts)

    async def change(self, kind: str, item: Json, *, listed: bool = True) -> None:
        """With `listed` False it is an event alone: lists stay as they are."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        uid, text = item["metadata"]["uid"], json.dumps(item)
        if listed and kind == "DELETED":
            del self.texts[uid]
        elif listed:
            self.texts[uid] = text
        self.history.append((self.version, uid, f'{{"type":"{kind}","object":{text}}}\n'))
        async with self.news:
            self.news.notify_all()

    async def after(self, version: int) -> None:
        """Returns when there is a newer version."""
        async with self.news:
            await self.news.wait_for(lambda: self.version > version)

    def since(self, version: int) -> list[tuple[int, str, str]] | None:
        """None: the history does not go back so far."""
        number = self.version - version
        return [*islice(reversed(self.history), number)][::-1] if number <= len(self.history) else None


class StubApi:
    """`nodes` and `pods`: what is there at the start. `watch_fault` holds for all watches, `lists_fail` for lists, `lease_lost`
    for the Lease: no answer. `overcommitted` has a line for each binding that gave a share of a GPU twice."""

    def __init__(self, nodes: Objects, pods: Objects, seed: int) -> None:
        self.watch_fault: WatchFault | None = None
        self.lists_fail = self.lease_lost = False
        self.overcommitted: list[str] = []
        self.bound = 0
        self._source = random.Random(seed)
        self.objects = {"nodes": nodes, "pods": pods, "configmaps": Objects()}
        #: UUID -> pod's UID -> cores, MiB.
        self._given: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self.pods: dict[str, Json] = {}
        self._lease: Json | None = None
        self._lease_version = 0

    def application(self) -> web.Application:
        made = web.Application()
        pod = "/api/v1/namespaces/{namespace}/pods"
        made.add_routes(
            [
                web.get("/api/v1/{kind:nodes|pods}", self._read),
                web.get("/api/v1/namespaces/{namespace}/{kind:configmaps}", self._read),
                web.get(f"{pod}/{{name}}", self._get_pod),
                web.post(f"{pod}/{{name}}/binding", self._bind),
                web.post(_LEASES, self._create_lease),
                web.get(f"{_LEASES}/{{name}}", self._get_lease),
                web.patch(f"{_LEASES}/{{name}}", self._patch_lease),
                web.post("/apis/events.k8s.io/v1/namespaces/{namespace}/events", self._event),
                web.patch("/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}", self._event),
            ]
        )
        return made

    # -- pods --------------------------------------------------------------------------------------------------------------

    async def create(self, item: Json) -> None:
        """A pod without a node, or one with a node and its placement."""
        uid = item["metadata"]["uid"]
        self.pods[uid] = item
        if item["spec"].get("nodeName"):
            self._give(uid, item)
        await self.objects["pods"].change("ADDED", item)

    async def delete(self, uid: str) -> None:
        item = self.pods.pop(uid)
        for shares in self._given.values():
            shares.pop(uid, None)
        await self.objects["pods"].change("DELETED", item)

    def expire(self) -> None:
        """Forgets the history, so that every watch from an earlier version is answered 410."""
        for objects in self.objects.values():
            objects.history.clear()
            objects.version += 1

    def _give(self, uid: str, item: Json) -> None:
        placement = decode_placement(item["metadata"]["annotations"][PLACEMENT_ANNOTATION])
        for share in placement.containers["main"]:
            held = self._given[share.gpu]
            held[uid] = share.cores, share.memory_mebibytes
            given = [sum(each) for each in zip(*held.values(), strict=True)]
            if given[0] > 100 or given[1] > GPU_MEBIBYTES:
                self.overcommitted.append(f"{share.gpu}: {sorted(held)}")

    async def _bind(self, request: web.Request) -> web.Response:
        binding = await request.json()
        uid = binding["metadata"]["uid"]
        item = self.pods.get(uid)
        if item is None:
            return failure(404, "NotFound", "the pod does not exist")
        if item["spec"].get("nodeName"):
            return failure(409, "Conflict", "the pod is already assigned to a node")
        item["spec"]["nodeName"] = binding["target"]["name"]
        item["metadata"]["annotations"] |= binding["metadata"].get("annotations") or {}
        self._give(uid, item)
        self.bound += 1
        await self.objects["pods"].change("MODIFIED", item)
        if self._source.random() < 0.02 and request.transport is not None:
            request.transport.abort()  # it has happened, and the answer is lost
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _get_pod(self, request: web.Request) -> web.Response:
        found = self.pods.get(f"uid-{request.match_info['name']}")
        return web.json_response(found) if found is not None else failure(404, "NotFound", "the pod does not exist")

    # -- lists and watches -------------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> web.StreamResponse:
        objects = self.objects[request.match_info["kind"]]
        if "watch" in request.query:
            response = web.StreamResponse()
            with suppress(ConnectionResetError):  # the client has gone
                return await self._watch(request, response, objects)
            return response
        if self.lists_fail:
            return failure(503, "ServiceUnavailable", "the server is overloaded")
        version, _, first = request.query.get("continue", f"{objects.version}/0").partition("/")
        texts, more = objects.page(int(first), int(request.query["limit"]))
        head = json.dumps({"resourceVersion": version, "continue": f"{version}/{int(first) + len(texts)}" if more else ""})
        return web.Response(text=f'{{"metadata":{head},"items":[{",".join(texts)}]}}', content_type="application/json")

    async def _watch(self, request: web.Request, response: web.StreamResponse, objects: Objects) -> web.StreamResponse:
        if self.watch_fault == "refused":
            return failure(429, "TooManyRequests", "slow down", {"Retry-After": "1"})
        loop, sent = asyncio.get_running_loop(), int(request.query["resourceVersion"])
        end = loop.time() + float(request.query["timeoutSeconds"])
        await response.prepare(request)
        first, marked = True, False
        while (now := loop.time()) < end:
            if self.watch_fault is not None:
                if self.watch_fault == "expired":
                    return response
                await asyncio.sleep(0.2)  # silent or late; what was held back follows at once
                continue
            found = objects.since(sent)
            if found is None:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return response
            if found:
                sent = found[-1][0]
                for text in self._reordered(found) if first else (text for _, _, text in found):
                    await response.write(text.encode())
            first = False
            if not marked and now > end - _BOOKMARK_SECONDS and objects.version > int(request.query["resourceVersion"]):
                marked = True
                mark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(sent)}}}
                await response.write(json.dumps(mark).encode() + b"\n")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, end - now)):
                    await objects.after(sent)
        return response

    def _reordered(self, events: list[tuple[int, str, str]]) -> list[str]:
        """The events of different objects in another order, those of each object in theirs."""
        by_object: defaultdict[str, deque[str]] = defaultdict(deque)
        for _, uid, text in events:
            by_object[uid].append(text)
        order = [uid for _, uid, _ in events]
        self._source.shuffle(order)
        return [by_object[uid].popleft() for uid in order]

    # -- Lease and events --------------------------------------------------------------------------------------------------

    async def _answerable(self) -> None:
        while self.lease_lost:  # noqa: ASYNC110 (a flag)
            await asyncio.sleep(0.1)

    async def _create_lease(self, request: web.Request) -> web.Response:
        await self._answerable()
        if self._lease is not None:
            return failure(409, "AlreadyExists", "it exists already")
        return self._store_lease(await request.json())

    async def _get_lease(self, _: web.Request) -> web.Response:
        await self._answerable()
        return web.json_response(self._lease) if self._lease is not None else failure(404, "NotFound", "there is none")

    async def _patch_lease(self, request: web.Request) -> web.Response:
        await self._answerable()
        patch = await request.json()
        if self._lease is None:
            return failure(404, "NotFound", "there is none")
        if patch["metadata"]["resourceVersion"] != self._lease["metadata"]["resourceVersion"]:
            return failure(409, "Conflict", "the object has been modified")
        return self._store_lease({"metadata": self._lease["metadata"], "spec": {**self._lease["spec"], **patch["spec"]}})

    def _store_lease(self, lease: Json) -> web.Response:
        self._lease_version += 1
        lease["metadata"] = {**lease["metadata"], "resourceVersion": str(self._lease_version)}
        self._lease = lease
        return web.json_response(lease)

    async def _event(self, request: web.Request) -> web.Response:
        return web.json_response(await request.json(), status=201)


def described(names: Sequence[str]) -> Objects:
    """Nodes."""
    return Objects(len(names), lambda number: json.dumps(node(names[number])))


def filler(name: str, node_name: str, gpus: Iterable[str]) -> Json:
    """A running pod that has these GPUs as a whole."""
    return gpu_pod(f"uid-{name}", node_name, [(gpu, 100, GPU_MEBIBYTES) for gpu in gpus])
