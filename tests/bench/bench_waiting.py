"""How soon kube-scheduler is made to try again the waiting pods when one of many fits: a real scheduler process at an API server.

`python -m tests.bench.bench_waiting [--nodes N] [--waiting N] [--rounds N]` prints one JSON object: seconds from the deletion of the pod
on one node until the annotation `gpumgr.io/waiting-pods-retried` is written. All nodes are full. Each waiting pod has another request and
was rejected. In each round, one pod fits on the node that becomes free, and one GPU on 100 other nodes gets another pod.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION
from tests.bench import figures
from tests.bench.big_cluster import GPU_MEBIBYTES, GPUS, Json, gpu_pod, name_of, uuid_of
from tests.bench.children import serving
from tests.bench.figures import median_and_worst
from tests.bench.soak_scheduler import replica
from tests.bench.stub_api import Objects, StubApi, described, filler

OWN_POD = "extender"
BUSY_NODES = 100
CLIENTS = 4
START_SECONDS = 120.0
#: kube-scheduler has this time to try a rejected pod by itself.
PAUSE_SECONDS = 2.0
WAIT_SECONDS = 60.0


class Api(StubApi):
    """`retried` is set when the scheduler updates its own pod."""

    def __init__(self, nodes: int) -> None:
        super().__init__(described([*map(name_of, range(nodes))]), Objects(), 1)
        self.retried = asyncio.Event()

    def application(self) -> web.Application:
        made = super().application()
        made.router.add_patch(f"/api/v1/namespaces/bench/pods/{OWN_POD}", self._patched)
        return made

    async def _patched(self, _: web.Request) -> web.Response:
        self.retried.set()
        return web.json_response({})


def pending(number: int, cores: int, mebibytes: int) -> Json:
    item = gpu_pod(f"uid-waiting-{number}", "", [("", cores, mebibytes)])
    del item["spec"]["nodeName"], item["metadata"]["annotations"][PLACEMENT_ANNOTATION]
    return {**item, "status": {"phase": "Pending"}}


def whole_gpus(number: int, gpus: int) -> Json:
    item = pending(number, 100, 0)
    item["spec"]["containers"][0]["resources"]["limits"] = {"tencent.com/vcuda-core": str(100 * gpus)}
    return item


class Bench:
    def __init__(self, api: Api, url: str, client: aiohttp.ClientSession, nodes: int) -> None:
        self._api, self._url, self._client = api, url, client
        self._names, self._source = [name_of(number) for number in range(nodes)], random.Random(2)

    async def filter(self, item: Json) -> Json:
        names = self._source.sample(self._names, len(self._names))
        async with self._client.post(f"{self._url}/filter", json={"Pod": item, "Nodes": None, "NodeNames": names}) as response:
            answer: Json = await response.json()
        return answer

    async def ready(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    if not (await self.filter(whole_gpus(-1, 1)))["Error"]:
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)

    async def wait(self, items: list[Json]) -> None:
        """The pods are created and rejected."""
        left = iter(items)

        async def client() -> None:
            for item in left:
                await self._api.create(item)
                answer = await self.filter(item)
                assert (answer["NodeNames"], answer["Error"]) == ([], ""), answer

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def round(self, number: int) -> float:
        """Seconds until the scheduler has found that the pod fits."""
        await self.wait([whole_gpus(-2 - number, GPUS)])
        await asyncio.sleep(PAUSE_SECONDS)
        self._api.retried.clear()
        for busy in range(BUSY_NODES):
            name = name_of(number * BUSY_NODES + busy)
            await self._api.delete(f"uid-{name}-last")
            await self._api.create(filler(f"{name}-last", name, [uuid_of(name, GPUS - 1)]))
        for part in ("first", "last"):
            await self._api.delete(f"uid-{self._names[-1 - number]}-{part}")
        began = time.perf_counter()
        async with asyncio.timeout(WAIT_SECONDS):
            await self._api.retried.wait()
        taken = time.perf_counter() - began
        answer = await self.filter(whole_gpus(-2 - number, GPUS))
        assert answer["NodeNames"] == [self._names[-1 - number]], answer
        return taken


async def measure(nodes: int, waiting: int, rounds: int) -> Mapping[str, Any]:
    api = Api(nodes)
    for number in range(nodes):
        name = name_of(number)
        gpus = [uuid_of(name, gpu) for gpu in range(GPUS)]
        await api.create(filler(f"{name}-first", name, gpus[:-1]))
        await api.create(filler(f"{name}-last", name, gpus[-1:]))
    os.environ.update(POD_NAME=OWN_POD, POD_NAMESPACE="bench")
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(api.application()) as url,
            replica(url, Path(folder), "a", leader_election=False) as scheduler,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client,
        ):
            bench = Bench(api, scheduler.url, client, nodes)
            await bench.ready()
            # They request more memory than a GPU has.
            large = [pending(number, 1 + number % 99, GPU_MEBIBYTES + 256 * (1 + number // 99)) for number in range(waiting)]
            await bench.wait(large)
            taken = [await bench.round(number) for number in range(rounds)]
            resident_mib = scheduler.resident_mib
    return {"nodes": nodes, "waiting": waiting, **median_and_worst(taken), "resident_mib": resident_mib}


if __name__ == "__main__":
    figures.main(measure, __doc__, nodes=5000, waiting=10_000, rounds=5)
