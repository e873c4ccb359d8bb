"""NodePrepareResources and NodeUnprepareResources of a node in mode dra, over its socket: one at a time, and 40 at once.

`python -m tests.bench.bench_dra [--rounds N]` prints one JSON object. The times are those of the agent's part of a call, from request to
answer: checks, durable commit, CDI spec. Without `live` in its name the claim is there at once. With it, each claim is read by a GET from
the simulated API server, a process of its own on loopback with HTTP without TLS, over at most eight connections at a time.
`live_all_40` is the time from the first of 40 calls at once to the last answer, as the kubelet has it.
"""

import asyncio
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from gpumgr.allocator.claims import AllocatedClaim
from gpumgr.dra.claim_reader import ClaimReader
from gpumgr.dra.slices import DRIVER
from gpumgr.kubeapi.client import ApiServer
from tests.bench import figures
from tests.bench.bench_metrics import node_snapshot
from tests.bench.children import child
from tests.bench.figures import Stopwatch, spread
from tests.component.dra.claim_node import ClaimNode
from tests.component.dra.harness import channel_to
from tests.kubelet_api import dra

CLAIMS = 40


class Bench:
    """A node with 40 claims; without `server` they are there without a request."""

    def __init__(self, folder: Path, server: ApiServer | None = None) -> None:
        folder.mkdir()
        self.node = ClaimNode(folder, None if server is None else ClaimReader(server, "bench"))
        self.claims: Sequence[Any] = ()
        self._channel: Any = None

    async def start(self, stack: AsyncExitStack) -> None:
        await self.node.state.set_snapshot(node_snapshot())
        await self.node.server.start()
        refs = [self.node.claim(number) for number in range(CLAIMS)]
        self.claims = [dra.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in refs]
        stack.push_async_callback(self.node.checkpoint.close)
        stack.push_async_callback(self.node.server.drain, 1.0)
        self._channel = await stack.enter_async_context(channel_to(self.node.server.path))

    async def call(self, rpc: str, claim: Any) -> None:
        message = getattr(dra, f"Node{rpc}ResourcesRequest")(claims=[claim])
        method = self._channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/Node{rpc}Resources")
        await method(message.SerializeToString(), timeout=60)

    async def one_at_a_time(self, rpc: str) -> Sequence[float]:
        for claim in self.claims:
            await self.call(rpc, claim)
        return self.node.take()

    async def at_once(self, rpc: str) -> tuple[Sequence[float], float]:
        """Also returns the seconds until the last answer."""
        with Stopwatch() as watch:
            await asyncio.gather(*(self.call(rpc, claim) for claim in self.claims))
        return self.node.take(), watch.seconds


def stored(claim: AllocatedClaim) -> Mapping[str, Any]:
    """The claim as the API server has it, with what else kube-scheduler writes."""
    results = [
        {
            "request": share.request,
            "driver": DRIVER,
            "pool": "bench",
            "device": share.device,
            "shareID": share.share_id,
            "consumedCapacity": {"cores": str(share.cores), "memory": f"{share.memory_mebibytes}Mi"},
        }
        for share in claim.shares
    ]
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": claim.ref.namespace, "name": claim.ref.name, "uid": claim.ref.uid, "resourceVersion": "1"},
        "spec": {"devices": {"requests": [request]}},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": uid} for (_, name), uid in claim.pods],
        },
    }


async def measure(*, rounds: int) -> Mapping[str, Any]:
    taken = defaultdict[str, list[Sequence[float]]](list)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = Bench(folder / "plain")
        await plain.start(stack)
        file = folder / "claims.json"
        file.write_text(json.dumps([stored(each) for each in plain.node.reader.claims.values()]))
        server = await ApiServer.connect(Path(stack.enter_context(child("tests.bench.claim_server", file))))
        stack.push_async_callback(server.close)
        live = Bench(folder / "live", server)
        await live.start(stack)
        for _ in range(rounds):
            for prefix, bench in (("", plain), ("live_", live)):
                for rpc in ("Prepare", "Unprepare"):
                    taken[f"{prefix}{rpc.lower()}_one_at_a_time"].append(await bench.one_at_a_time(rpc))
                for rpc in ("Prepare", "Unprepare"):
                    each, everything = await bench.at_once(rpc)
                    taken[f"{prefix}{rpc.lower()}_{CLAIMS}_at_once"].append(each)
                    if prefix and rpc == "Prepare":
                        taken[f"{prefix}all_{CLAIMS}"].append([everything])
    return {name: spread(found) for name, found in taken.items() if not name.startswith("live_unprepare")}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=5)
