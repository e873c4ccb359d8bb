"""An API server of a large cluster (stub_api.py) in a process of its own.

`python -m tests.bench.cluster_stub NODES PODS CPU_PODS` prints its URL and process id and serves until standard input ends. NODES have 8
GPUs each and PODS with one container on them, CPU_PODS request no GPU. The Binding of any pod is accepted. POST /control/...: `nodes`
(names that join), `events` (seconds, rate of changes of pods' status), `end` (bound pods are deleted).
"""

import asyncio
import json
import sys
from functools import partial

from aiohttp import web

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION, decode_placement
from tests.bench.big_cluster import Cluster, gpu_pod, node
from tests.bench.children import serve
from tests.bench.stub_api import Objects, StubApi


class ClusterStub(StubApi):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        nodes, pods = (Objects(count, partial(cluster.text, kind)) for kind, count in cluster.counts.items())
        super().__init__(nodes, pods, seed=0)

    def application(self) -> web.Application:
        made = super().application()
        for name, handler in (("nodes", self._join), ("events", self._change), ("end", self._end)):
            made.router.add_post(f"/control/{name}", handler)
        return made

    async def _bind(self, request: web.Request) -> web.Response:
        binding = await request.json()
        placement = decode_placement(binding["metadata"]["annotations"][PLACEMENT_ANNOTATION])
        shares = [(each.gpu, each.cores, each.memory_mebibytes) for each in placement.containers["main"]]
        await self.create(gpu_pod(binding["metadata"]["uid"], binding["target"]["name"], shares))
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _join(self, request: web.Request) -> web.Response:
        for name in await request.json():
            await self.objects["nodes"].change("ADDED", node(name))
        return web.Response()

    async def _end(self, _: web.Request) -> web.Response:
        for uid in list(self.pods):
            await self.delete(uid)
        return web.Response()

    async def _change(self, request: web.Request) -> web.Response:
        """Evenly over all pods."""
        asked = await request.json()
        loop, count = asyncio.get_running_loop(), int(asked["seconds"] * asked["rate"])
        begun, all_pods = loop.time(), self._cluster.counts["pods"]
        for number in range(count):
            item = json.loads(self._cluster.text("pods", number * all_pods // count))
            await self.objects["pods"].change("MODIFIED", item, listed=False)
            if (ahead := number / asked["rate"] - (loop.time() - begun)) > 0:
                await asyncio.sleep(ahead)
        return web.json_response(loop.time() - begun)


if __name__ == "__main__":
    asyncio.run(serve(ClusterStub(Cluster(*map(int, sys.argv[1:4]))).application(), sys.stdin.read))
