"""Many different requests, and many pods that wait, at 5,000 nodes with 8 GPUs: the extender in this process, without HTTP.

`python -m tests.bench.bench_requests [--nodes N] [--pods N] [--requests N] [--waiting N]` prints one JSON object. Times are CPU of this
process, with the decoding of the request. The names of the nodes come in another order each time, as kube-scheduler sends them.
"""

import asyncio
import gc
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from gpumgr.cluster.core.quota import NamespaceQuota
from gpumgr.cluster.scheduler.extender import Extender
from gpumgr.cluster.scheduler.objects import QuotaLabels, parse_node
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.cluster.scheduler.wire import FilterArgs, FilterResult
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kube.client import ApiServer
from gpumgr.settings.schema import SchedulerSettings
from tests.bench import figures
from tests.bench.big_cluster import Cluster, name_of, node, uuid_of
from tests.bench.figures import resident_mib, spread

Json = dict[str, Any]
ORDERS = 50
#: Placed pods that stay: those before them end.
STAY = 1000
POOL = "gaia.tencent.com/gpu-pool"


def pod(number: int, *containers: tuple[int, int], cpu: str = "1", init: int = 0, **annotations: str) -> Json:
    """(cores, memory blocks) of each container; the first `init` of them are init containers."""
    made = [
        {"name": f"c{place}", "resources": {"limits": {"cpu": cpu, CORE_RESOURCE: str(cores), MEMORY_RESOURCE: str(blocks)}}}
        for place, (cores, blocks) in enumerate(containers)
    ]
    named = {key.replace("_", "-"): text for key, text in annotations.items()}
    return {
        "metadata": {
            "namespace": "bench",
            "name": f"p{number}",
            "uid": f"uid-p{number}",
            "annotations": {f"gpumgr.io/{key}": text for key, text in named.items()},
        },
        "spec": {"initContainers": made[:init], "containers": made[init:]},
        "status": {"phase": "Pending"},
    }


def different(number: int, source: random.Random) -> Json:
    """Seven of ten are shares of a GPU."""
    cores, blocks, cpu = source.randint(1, 99), source.randint(1, 318), f"{source.randint(1, 16000)}m"
    match number % 10:
        case 0:
            return pod(number, (100 * source.randint(1, 8), 0), cpu=cpu)
        case 1:
            return pod(number, (cores, blocks), cpu=cpu, avoid_gpu_model=f"model-{number}")
        case 2:
            named = uuid_of(name_of(source.randrange(1000)), source.randrange(8))
            return pod(number, (cores, blocks), cpu=cpu, use_gpu_uuid=named)
        case _:
            return pod(number, (cores, blocks if number % 10 < 9 else blocks + 318), cpu=cpu)


class Bench:
    def __init__(self, nodes: int, pods: int) -> None:
        server, settings = ApiServer.__new__(ApiServer), SchedulerSettings()  # no request is sent
        self._time = 0.0
        self.watches = ClusterWatches(server, settings)
        self.index, self.quotas = self.watches.index, self.watches.quotas
        self.watches.synced = True
        for number in range(nodes):
            item = node(name_of(number))
            item["metadata"]["labels"][POOL] = f"pool-{number % 2}"
            self.index.set_node(parse_node(item, QuotaLabels(pool=POOL)).state)
        cluster = Cluster(nodes, pods, 0)
        for number in range(cluster.counts["pods"]):
            placed = self.watches.parse_pod(json.loads(cluster.text("pods", number))).placed
            assert placed is not None
            self.index.bind(placed)
        for number in range(20 * nodes):
            self.index.use_cpu(f"cpu-{number}", name_of(number // 20), number * 7 % 1993 + 1)
        self.extender = Extender(server, self.watches, settings, clock=lambda: self._time)
        source, names = random.Random(1), [name_of(number) for number in range(nodes)]
        self._orders = [json.dumps(source.sample(names, nodes), separators=(",", ":")) for _ in range(ORDERS)]
        self._calls = 0
        self.index.settle()
        gc.collect()
        gc.freeze()

    async def filter(self, item: Json) -> tuple[float, FilterResult]:
        """CPU seconds, and the answer."""
        self._calls += 1
        body = f'{{"Pod":{json.dumps(item)},"Nodes":null,"NodeNames":{self._orders[self._calls % ORDERS]}}}'.encode()
        began = time.process_time()
        found = await self.extender.answer_filter(msgspec.json.decode(body, type=FilterArgs))
        return time.process_time() - began, found

    async def in_turn(self, requests: int) -> Mapping[str, Any]:
        """Each of them is new."""
        source, taken, rejected = random.Random(2), list[float](), 0
        for number in range(requests):
            seconds, found = await self.filter(different(number, source))
            assert not found.error, found
            taken.append(seconds)
            rejected += not found.node_names
            self.index.remove(f"uid-p{number - STAY}")
        return {**spread([taken]), "rejected": rejected, "resident_mib": resident_mib()}

    async def new_requests(self) -> Mapping[str, Any]:
        """With the longest time for which the event loop served no other task."""
        cases: dict[str, list[Json]] = {
            "share": [pod(number, (20 + number, 7)) for number in range(40)],
            "whole": [pod(number, (100 * (1 + number % 8), 10 + number)) for number in range(10)],
            "init_containers_64": [pod(0, *[(1 + number, 1 + number) for number in range(63)], (1, 1), init=63)],
            "rejected_64": [pod(1, *[(1 + number, 1 + number) for number in range(63)], (900, 0), init=63)],
        }
        found: dict[str, Any] = {}
        for name, items in cases.items():
            watching = asyncio.create_task(self._longest_hold())
            await asyncio.sleep(0)
            taken = list[float]()
            for item in items:
                taken.append((await self.filter({**item, "metadata": {**item["metadata"], "uid": "uid-new"}}))[0])
                await asyncio.sleep(0)
            self.index.remove("uid-new")
            watching.cancel()
            (longest,) = await asyncio.gather(watching)
            found[name] = {**spread([taken]), "longest_hold_ms": round(1000 * longest, 1)}
        return found

    async def _longest_hold(self) -> float:
        longest, last = 0.0, time.process_time()
        try:
            while True:
                await asyncio.sleep(0)  # each task has had its turn
                now = time.process_time()
                longest, last = max(longest, now - last), now
        except asyncio.CancelledError:
            return longest

    async def wait(self, waiting: int) -> Mapping[str, Any]:
        """Measures pods with few different requests, each with the names in another order. Then each pod has its own request, and
        one of them fits."""
        before, found = resident_mib(), dict[str, Any]()
        quota = NamespaceQuota(pools=frozenset({"pool-1"}))
        for name, limits, count in (("rejection", {}, waiting), ("rejection_with_quota", {"bench": quota}, 1000)):
            self.quotas.limits = limits
            found[name] = spread([[seconds async for seconds in self._rejections(count)]])
        self.quotas.limits = {}
        found["waiting_mib"] = round(resident_mib() - before, 1)
        async for _ in self._rejections(waiting, different=True):
            pass
        found["retry"] = await self._retry(waiting)
        return found

    async def _rejections(self, count: int, *, different: bool = False) -> AsyncIterator[float]:
        for number in range(count):
            yield await self._rejected(pod(number, (900 + 100 * (number % 55), number if different else 0)))

    async def _rejected(self, item: Json) -> float:
        self.watches.pending[item["metadata"]["uid"]] = self.watches.parse_pod(item)
        seconds, found = await self.filter(item)
        assert not found.node_names, found
        return seconds

    async def _retry(self, number: int) -> Mapping[str, Any]:
        """One more pod waits, for the GPUs of one node, which become free; 100 nodes change before each look of the retry loop."""
        name = name_of(1)
        await self._rejected(pod(number, (800, 0), use_gpu_uuid=",".join(uuid_of(name, gpu) for gpu in range(8))))
        for uid in list(self.index.pods_on(name)):
            self.index.remove(uid)
        looks = list[float]()
        while True:
            self._time += 10
            for each in range(100):
                self.index.use_cpu(f"busy-{each}", name_of(each), len(looks) + 1)
            began = time.process_time()
            found = await self.extender.retryable()
            looks.append(time.process_time() - began)
            if found is not None and found.uid == f"uid-p{number}":
                return {"looks": len(looks), "longest_look_ms": round(1000 * max(looks), 1)}


async def measure(nodes: int, pods: int, requests: int, waiting: int) -> Mapping[str, Any]:
    bench = Bench(nodes, pods)
    return {
        "nodes": nodes,
        "requests": requests,
        "waiting": waiting,
        "started_mib": resident_mib(),
        "new": await bench.new_requests(),
        "wait": await bench.wait(waiting),
        "in_turn": await bench.in_turn(requests),
    }


if __name__ == "__main__":
    figures.main(measure, __doc__, nodes=5000, pods=20_000, requests=10_000, waiting=10_000)
