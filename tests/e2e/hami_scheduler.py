"""A stand-in for HAMi's scheduler: an extender of a real kube-scheduler that writes on nodes and pods what HAMi 2.10 writes.

Its verbs are those of HAMi's `pkg/scheduler`: `filter` chooses one node and its GPUs and annotates the pod, `bind` takes the node's lock,
sets the pod's phase and binds it. It represents what a node agent gets to see, so it has one order of GPUs (spread) and no webhook.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .api import Api, ApiError
from .manifests import Json

REGISTER = "hami.io/node-nvidia-register"
SCORES = "hami.io/node-nvidia-score"
HANDSHAKE = "hami.io/node-handshake"
LOCK = "hami.io/mutex.lock"
TO_ALLOCATE, ALLOCATED = "hami.io/vgpu-devices-to-allocate", "hami.io/vgpu-devices-allocated"
PHASE = "hami.io/bind-phase"
COUNT, MEMORY, PERCENTAGE, CORES = (f"nvidia.com/{name}" for name in ("gpu", "gpumem", "gpumem-percentage", "gpucores"))
#: What kube-scheduler sends here; HAMi's chart has all of them ignored by kube-scheduler itself.
MANAGED = [{"name": name, "ignoredByScheduler": True} for name in (COUNT, MEMORY, PERCENTAGE, CORES)]


class HamiScheduler:
    """`url` is the extender's prefix. `locked`: how often a bind found the node locked by another pod."""

    def __init__(self, make_api: Callable[[], Api]) -> None:
        self._make_api = make_api
        self._choosing = threading.Lock()
        self.locked = 0
        verbs = {"/filter": self._filter, "/bind": self._bind}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                args = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api = make_api()
                try:
                    answer = verbs[self.path](api, args)
                except ApiError as error:
                    answer = {"Error": str(error)}
                finally:
                    api.close()
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["HamiScheduler"]:
        thread = threading.Thread(target=self._server.serve_forever, name="hami-scheduler", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _filter(self, api: Api, args: Json) -> Json:
        pod, failed = args["Pod"], dict[str, str]()
        with self._choosing:
            others = [
                each for each in api.request("GET", "/api/v1/pods")["items"] if each["metadata"]["uid"] != pod["metadata"]["uid"]
            ]
            used = _used(others)
            for name in args["NodeNames"]:
                node = api.request("GET", f"/api/v1/nodes/{name}")
                annotations = node["metadata"].get("annotations") or {}
                if REGISTER not in annotations:
                    failed[name] = "node unregistered"
                    continue
                if "Requesting" not in annotations.get(HANDSHAKE, ""):
                    _annotate(api, f"/api/v1/nodes/{name}", {HANDSHAKE: f"Requesting_{datetime.now():%Y-%m-%d %H:%M:%S}"})
                devices = _fit(pod, json.loads(annotations[REGISTER]), used)
                if devices is None:
                    failed[name] = "1/1 CardInsufficientMemory"
                    continue
                written = {
                    "hami.io/vgpu-node": name,
                    "hami.io/vgpu-time": str(int(time.time())),
                    TO_ALLOCATE: devices,
                    ALLOCATED: devices,
                }
                _annotate(api, _path(pod), written, labels={"hami.io/vgpu-node": name})
                return {"NodeNames": [name]}
        return {"NodeNames": [], "FailedNodes": failed}

    def _bind(self, api: Api, args: Json) -> Json:
        namespace, name, node = args["PodNamespace"], args["PodName"], args["Node"]
        if not self._take(api, node, f"{namespace},{name}"):
            self.locked += 1
            return {"Error": f"node {node} has been locked within 5m0s"}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            _annotate(api, path, {PHASE: "allocating", "hami.io/bind-time": str(int(time.time()))})
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            api.request(
                "POST", f"{path}/binding", {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            )
        except ApiError:
            _annotate(api, f"/api/v1/nodes/{node}", {LOCK: None})
            raise
        return {"Error": ""}

    def _take(self, api: Api, node: str, owner: str) -> bool:
        path = f"/api/v1/nodes/{node}"
        found = api.request("GET", path)["metadata"]
        held = (found.get("annotations") or {}).get(LOCK)
        if held is not None and not held.endswith(f",{owner}"):
            return False
        try:
            value = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ},{owner}"
            _annotate(api, path, {LOCK: value}, version=found["resourceVersion"])
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        return True


def running_pod(pod: Json, node: str, *containers: Sequence[tuple[str, int, int]]) -> Json:
    """The pod as HAMi's scheduler and device plugin have left it once it runs. `containers`: the (UUID, MiB, cores) of each, those of init
    containers first; empty for one without GPUs.

    The plugin decodes the list, empties the entry of each container, and encodes the list, in which the end counts as one more entry
    (patchErasedAnnotation in HAMi 2.10's pkg/device-plugin/nvidiadevice/nvinternal/plugin/util.go)."""
    allocated = "".join("".join(f"{uuid},NVIDIA,{memory},{cores}:" for uuid, memory, cores in each) + ";" for each in containers)
    now = str(int(time.time()))
    written = {
        "hami.io/vgpu-node": node,
        "hami.io/vgpu-time": now,
        TO_ALLOCATE: ";" * (len(containers) + sum(bool(each) for each in containers)),
        ALLOCATED: allocated,
        "hami.io/bind-time": now,
        PHASE: "success",
    }
    metadata = pod["metadata"]
    annotations, labels = (
        {**metadata.get("annotations", {}), **written},
        {**metadata.get("labels", {}), "hami.io/vgpu-node": node},
    )
    return {**pod, "metadata": {**metadata, "annotations": annotations, "labels": labels}}


def register(api: Api, node: str, gpus: Sequence[Json]) -> None:
    """What HAMi's plugin and scheduler write at a node without pods; `gpus`: id, devmem and type of each. The plugin's order is that of a
    map, so that it changes (HAMi 2.10, pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go)."""
    rows = [
        {"id": gpu["id"], **({"index": place} if place else {}), "count": 10, "devmem": gpu["devmem"], "devcore": 100,
         "type": gpu["type"], "mode": "hami-core", "health": True}
        for place, gpu in enumerate(gpus)
    ]  # fmt: skip
    ids = [gpu["id"] for gpu in gpus]
    scores = [{"uuid": each, "score": {other: 20 for other in ids if other != each}} for each in ids]
    written = {
        REGISTER: json.dumps(rows[3:] + rows[:3], separators=(",", ":")),
        SCORES: json.dumps(scores, separators=(",", ":")),
        HANDSHAKE: f"Requesting_{datetime.now():%Y-%m-%d %H:%M:%S}",
    }
    _annotate(api, f"/api/v1/nodes/{node}", written)


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _annotate(
    api: Api,
    path: str,
    annotations: Mapping[str, str | None],
    *,
    labels: Mapping[str, str] | None = None,
    version: str | None = None,
) -> None:
    metadata: Json = {"annotations": dict(annotations)}
    if labels is not None:
        metadata["labels"] = dict(labels)
    if version is not None:
        metadata["resourceVersion"] = version
    api.request("PATCH", path, {"metadata": metadata})


def devices_of(pod: Json) -> list[list[tuple[str, int, int]]]:
    """For each container: the GPUs (UUID), MiB and cores that HAMi's annotation has."""
    text = (pod["metadata"].get("annotations") or {}).get(ALLOCATED, "")
    containers = [[device.split(",") for device in each.split(":") if device] for each in text.split(";")[:-1]]
    return [[(uuid, int(memory), int(cores)) for uuid, _, memory, cores in each] for each in containers]


def _used(pods: Iterable[Json]) -> Mapping[str, Counter[str]]:
    """GPU -> slots, MiB and cores of the pods that have not ended."""
    used: dict[str, Counter[str]] = {}
    for pod in pods:
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            continue
        for container in devices_of(pod):
            for uuid, memory, cores in container:
                used.setdefault(uuid, Counter()).update(slots=1, memory=memory, cores=cores)
    return used


def _fit(pod: Json, gpus: list[dict[str, Any]], used: Mapping[str, Counter[str]]) -> str | None:
    """The text of the annotation; None: the node has too little."""
    now = {gpu["id"]: Counter(used.get(gpu["id"], {})) for gpu in gpus}
    containers = list[str]()
    for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
        limits = (container.get("resources") or {}).get("limits") or {}
        count, cores = int(limits.get(COUNT, 0)), int(limits.get(CORES, 0))
        chosen: list[str] = []
        for gpu in sorted(gpus, key=lambda gpu: (now[gpu["id"]]["slots"], gpu.get("index", 0))):
            memory = int(limits.get(MEMORY, 0)) or gpu["devmem"] * int(limits.get(PERCENTAGE, 100)) // 100
            held = now[gpu["id"]]
            fits = (
                held["slots"] < gpu["count"]
                and held["memory"] + memory <= gpu["devmem"]
                and held["cores"] + cores <= gpu["devcore"]
            )
            exclusive = cores == 100 and held["slots"]
            if len(chosen) < count and fits and not exclusive and gpu.get("health"):
                chosen.append(f"{gpu['id']},NVIDIA,{memory},{cores}:")
                held.update(slots=1, memory=memory, cores=cores)
        if len(chosen) < count:
            return None
        containers.append("".join(chosen))
    return "".join(f"{each};" for each in containers)
