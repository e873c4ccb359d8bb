"""An API server of a large cluster, as far as a scheduler reads it: lists in pages, watches, and the Binding of a pod.

`python -m tests.bench.cluster_stub NODES PODS CPU_PODS` prints its URL and serves until standard input ends. NODES have 8 GPUs each and
PODS with one container on them, CPU_PODS request no GPU. Objects are texts made when they are listed, of the usual length (4 kB).
A bound pod appears in the watch as it does on an API server. POST /control/...: `nodes` (names that join), `events` (seconds, rate of
changes of pods' status), `end` (bound pods are deleted).
"""

import asyncio
import json
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from gpumgr.common.units import BLOCK_MEBIBYTES, CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    PLACEMENT_ANNOTATION,
    Inventory,
    InventoryGpu,
    decode_placement,
    encode,
)
from gpumgr.placement.devices import score_matrix
from tests.bench.children import serving
from tests.topologies import topology_from_matrix

GPUS: Final = 8
GPU_MEBIBYTES: Final = 81_408
#: Before the end of a watch.
BOOKMARK_SECONDS: Final = 2
KEPT_EVENTS: Final = 5000
PREFIX: Final = "gpu-node-eu-west-"
#: (cores, memory blocks) of one container.
SHAPES: Final = ((10, 16), (25, 64), (50, 100), (100, 0), (200, 0), (30, 60), (40, 90), (20, 30))
_FIELDS = [{"manager": f"controller-{number}", "operation": "Update", "fieldsV1": {f"f:{'x' * 240}": {}}} for number in range(6)]
_LEVELS = score_matrix(topology_from_matrix([["X" if a == b else "NV18" for b in range(GPUS)] for a in range(GPUS)]))
Json = dict[str, Any]


def name_of(node: int) -> str:
    return f"{PREFIX}{node:05d}"


def uuid_of(node: str, gpu: int) -> str:
    return f"GPU-{abs(hash((node, gpu))) & 0xFFFFFFFF:08x}-0000-4000-8000-{node[-5:]}{gpu:07d}"


def node(name: str) -> Json:
    gpus = tuple(
        InventoryGpu(uuid=uuid_of(name, gpu), model="NVIDIA H100 80GB HBM3", memory=GPU_MEBIBYTES, numa=gpu // 4)
        for gpu in range(GPUS)
    )
    inventory = encode(Inventory(driver="580.65.06", topology_manager="none", gpus=gpus, levels=_LEVELS))
    amounts = {"cpu": "192", CORE_RESOURCE: str(100 * GPUS), MEMORY_RESOURCE: str(GPUS * GPU_MEBIBYTES // BLOCK_MEBIBYTES)}
    images = [
        {"names": [f"registry.invalid/team/image-{number}@sha256:{'0' * 64}"], "sizeBytes": 1 << 30} for number in range(40)
    ]
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {"kubernetes.io/hostname": name},
            "annotations": {INVENTORY_ANNOTATION: inventory},
            "managedFields": _FIELDS,
        },
        "status": {"capacity": amounts, "allocatable": amounts, "images": images, "conditions": [ready]},
    }


def pod(uid: str, node_name: str, wanted: dict[str, str], annotations: dict[str, str], cpu: str = "1") -> Json:
    resources = {"limits": {"cpu": cpu, **wanted}, "requests": {"cpu": cpu, **wanted}}
    environment = [{"name": f"VARIABLE_{number}", "value": "some text of usual length"} for number in range(12)]
    container = {"name": "main", "image": "registry.invalid/work:1", "resources": resources, "env": environment}
    return {
        "metadata": {
            "namespace": "bench",
            "name": uid.removeprefix("uid-"),
            "uid": uid,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": annotations,
            "managedFields": _FIELDS,
        },
        "spec": {"nodeName": node_name, "containers": [container], "schedulerName": "gpumgr-scheduler"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def gpu_pod(uid: str, node_name: str, shares: list[tuple[str, int, int]]) -> Json:
    """`shares`: UUID, cores, MiB of each GPU."""
    whole = shares[0][1] == 100
    wanted = {CORE_RESOURCE: str(sum(cores for _, cores, _ in shares))}
    if not whole:
        wanted[MEMORY_RESOURCE] = str(shares[0][2] // BLOCK_MEBIBYTES)
    placement = {"containers": {"main": [list(each) for each in shares]}, "node": node_name, "version": 1}
    return pod(uid, node_name, wanted, {PLACEMENT_ANNOTATION: json.dumps(placement)})


class Cluster:
    """Its objects by number, in the order in which they are listed."""

    def __init__(self, nodes: int, pods: int, cpu_pods: int) -> None:
        self._pods = list(_placements(nodes, pods))
        self.counts = {"nodes": nodes, "pods": len(self._pods) + cpu_pods, "configmaps": 0}
        self._nodes = nodes
        self.bound: dict[str, Json] = {}
        self._cpu = json.dumps(pod("uid-cpu-NUMBER", "NODE", {}, {}, "CPU"))

    def text(self, kind: str, number: int) -> str:
        if kind == "nodes":
            return json.dumps(node(name_of(number)))
        if number < len(self._pods):
            return json.dumps(gpu_pod(f"uid-gpu-{number}", *self._pods[number]))
        made = self._cpu.replace("NUMBER", str(number)).replace("NODE", name_of(number % self._nodes))
        return made.replace('"CPU"', f'"{number * 7 % 1993 + 1}m"')


def _placements(nodes: int, pods: int) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Random shapes on random GPUs with the room, so that hardly two nodes are alike."""
    source, left = random.Random(5), pods
    for number in range(nodes):
        name, free = name_of(number), [(100, GPU_MEBIBYTES)] * GPUS
        for _ in range(min(left, -(-pods // nodes))):
            cores, blocks = source.choice(SHAPES)
            count, amounts = max(1, cores // 100), (min(cores, 100), blocks * BLOCK_MEBIBYTES or GPU_MEBIBYTES)
            fitting = [gpu for gpu in range(GPUS) if free[gpu][0] >= amounts[0] and free[gpu][1] >= amounts[1]]
            if len(fitting) < count:
                continue
            chosen = sorted(source.sample(fitting, count))
            for gpu in chosen:
                free[gpu] = (free[gpu][0] - amounts[0], free[gpu][1] - amounts[1])
            left -= 1
            yield name, [(uuid_of(name, gpu), *amounts) for gpu in chosen]


class Server:
    """Watches end and get bookmarks as those of kube-apiserver do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watches: dict[str, set[asyncio.Queue[bytes]]] = {"nodes": set(), "pods": set(), "configmaps": set()}
        #: The last events, for watches that are resumed, and the version of the last one.
        self._events: dict[str, deque[tuple[int, bytes]]] = {kind: deque(maxlen=KEPT_EVENTS) for kind in self._watches}
        self._version = 1

    def application(self) -> web.Application:
        made = web.Application()
        made.add_routes(
            [
                web.get("/api/v1/{kind:nodes|pods}", self._read),
                web.get("/api/v1/namespaces/{namespace}/{kind:configmaps}", self._read),
                web.post("/api/v1/namespaces/{namespace}/pods/{name}/binding", self._bind),
                web.post("/control/nodes", self._join),
                web.post("/control/events", self._change),
                web.post("/control/end", self._end),
            ]
        )
        return made

    async def _read(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if "watch" in request.query:
            return await self._watch(request, kind)
        first = int(request.query.get("continue", 0))
        end = min(self._cluster.counts[kind], first + int(request.query["limit"]))
        following = str(end) if end < self._cluster.counts[kind] else ""
        head = json.dumps({"resourceVersion": str(self._version), "continue": following})
        items = ",".join(self._cluster.text(kind, number) for number in range(first, end))
        return web.Response(text=f'{{"metadata":{head},"items":[{items}]}}', content_type="application/json")

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        events: asyncio.Queue[bytes] = asyncio.Queue()
        for version, line in self._events[kind]:
            if version > int(request.query["resourceVersion"]):
                events.put_nowait(line)
        self._watches[kind].add(events)
        response = web.StreamResponse()
        await response.prepare(request)
        begun, seconds = asyncio.get_running_loop().time(), float(request.query["timeoutSeconds"])
        try:
            await self._write_until(begun + seconds - BOOKMARK_SECONDS, response, events)
            bookmark = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}})
            while not events.empty():
                await response.write(events.get_nowait())
            if self._version > int(request.query["resourceVersion"]):
                await response.write(bookmark.encode() + b"\n")
            await self._write_until(begun + seconds, response, events)
        except ConnectionResetError:  # the scheduler was killed
            pass
        finally:
            self._watches[kind].discard(events)
        return response

    async def _write_until(self, end: float, response: web.StreamResponse, events: asyncio.Queue[bytes]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while True:
                    await response.write(await events.get())

    def _send(self, kind: str, change: str, text: str) -> None:
        self._version += 1
        text = text.replace('"resourceVersion": "1"', f'"resourceVersion": "{self._version}"', 1)
        line = f'{{"type":"{change}","object":{text}}}\n'.encode()
        self._events[kind].append((self._version, line))
        for events in self._watches[kind]:
            events.put_nowait(line)

    async def _bind(self, request: web.Request) -> web.Response:
        binding = await request.json()
        placement = decode_placement(binding["metadata"]["annotations"][PLACEMENT_ANNOTATION])
        made = gpu_pod(
            binding["metadata"]["uid"],
            binding["target"]["name"],
            [(each.gpu, each.cores, each.memory_mebibytes) for each in placement.containers["main"]],
        )
        self._cluster.bound[made["metadata"]["uid"]] = made
        self._send("pods", "MODIFIED", json.dumps(made))
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _join(self, request: web.Request) -> web.Response:
        for name in await request.json():
            self._send("nodes", "ADDED", json.dumps(node(name)))
        return web.Response()

    async def _end(self, _: web.Request) -> web.Response:
        for made in self._cluster.bound.values():
            self._send("pods", "DELETED", json.dumps(made))
        self._cluster.bound.clear()
        return web.Response()

    async def _change(self, request: web.Request) -> web.Response:
        """Evenly over all pods."""
        asked = await request.json()
        loop, count = asyncio.get_running_loop(), int(asked["seconds"] * asked["rate"])
        begun, all_pods = loop.time(), self._cluster.counts["pods"]
        for number in range(count):
            self._send("pods", "MODIFIED", self._cluster.text("pods", number * all_pods // count))
            if (ahead := number / asked["rate"] - (loop.time() - begun)) > 0:
                await asyncio.sleep(ahead)
        return web.json_response(loop.time() - begun)


async def serve(application: web.Application, ended: Callable[[], object]) -> None:
    """Prints the URL and the process id, and serves until `ended` returns."""
    async with serving(application) as url:
        print(f"{url} {os.getpid()}", flush=True)
        await asyncio.to_thread(ended)


def scheduler_command(api: str, folder: Path, name: str, *changes: str) -> tuple[list[str], str]:
    """`gpumgr scheduler` for this API server, with changes of its settings; and its URL."""
    config = folder / f"{name}.json"
    user = {"clusters": [{"name": "a", "cluster": {"server": api}}], "users": [{"name": "a", "user": {}}]}
    context = {"contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a"}
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **user, **context}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [f"--kubeconfig={config}", f"--listen={address}", "--insecure-loopback"]
    words += [f"--set={each}" for each in ("log.level=error", "scheduler.http_port=0", *changes)]
    return [sys.executable, "-m", "gpumgr", "scheduler", *words], f"http://{address}"


if __name__ == "__main__":
    asyncio.run(serve(Server(Cluster(*map(int, sys.argv[1:4]))).application(), sys.stdin.read))
