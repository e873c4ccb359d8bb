"""NodePrepareResources and NodeUnprepareResources of a node in mode dra, over its socket: one at a time, and 40
at once, called by a process of its own.

`python -m tests.bench.bench_dra [--rounds N]` prints one JSON object. The times are those of the agent's part of a call, from request to
answer: checks, durable commit, CDI spec. Without `live` in its name the claim is there at once. With it, each claim is read by a GET from
the simulated API server, a process of its own on loopback with HTTP without TLS, over at most eight connections at a time.
`live_all_40` is the time from the first of 40 calls at once to the last answer, as the kubelet has it.
"""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from gpumgr.common.units import DRA_DRIVER
from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.claim_reader import ClaimReader
from gpumgr.ledger.claims import AllocatedClaim
from tests.bench import figures
from tests.bench.bench_metrics import node_snapshot
from tests.bench.children import child
from tests.bench.figures import spread
from tests.component.kubelet.dra.claim_node import ClaimNode

CLAIMS = 40


class Bench:
    """A node with 40 claims; without `server` they are there without a request."""

    def __init__(self, folder: Path, server: ApiServer | None = None) -> None:
        folder.mkdir()
        self.node = ClaimNode(folder, None if server is None else ClaimReader(server, "bench"))

    async def start(self, stack: AsyncExitStack) -> None:
        await self.node.state.set_snapshot(node_snapshot())
        await self.node.server.listen()
        for number in range(CLAIMS):
            self.node.claim(number)
        stack.push_async_callback(self.node.checkpoint.close)
        stack.push_async_callback(self.node.server.drain, 1.0)
        command = [sys.executable, "-m", "tests.bench.claim_client", str(self.node.server.path), str(CLAIMS)]
        self._client = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        stack.push_async_callback(self._end_client)

    async def _end_client(self) -> None:
        await self._client.communicate(b"")  # closes its standard input

    async def call_all(self, rpc: str, order: str) -> tuple[Sequence[float], float]:
        """The seconds of the agent's part of each call, and those from the first call to the last answer."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{rpc} {order}\n".encode())
        seconds = float(await self._client.stdout.readline())
        return self.node.take(), seconds


def stored(claim: AllocatedClaim) -> Mapping[str, Any]:
    """The claim as the API server has it, with what else kube-scheduler writes."""
    results = [
        {
            "request": share.request,
            "driver": DRA_DRIVER,
            "pool": "bench",
            "device": share.device,
            "shareID": share.share_id,
            "consumedCapacity": {"cores": str(share.cores), "memory": f"{share.memory_mebibytes}Mi"},
        }
        for share in claim.shares
    ]
    request = {"name": "gpu", "exactly": {"deviceClassName": DRA_DRIVER, "allocationMode": "ExactCount", "count": 1}}
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
                for order, name in (("one_at_a_time", "one_at_a_time"), ("at_once", f"{CLAIMS}_at_once")):
                    for rpc in ("Prepare", "Unprepare"):
                        each, everything = await bench.call_all(rpc, order)
                        taken[f"{prefix}{rpc.lower()}_{name}"].append(each)
                        if prefix and (rpc, order) == ("Prepare", "at_once"):
                            taken[f"{prefix}all_{CLAIMS}"].append([everything])
    return {name: spread(found) for name, found in taken.items() if not name.startswith("live_unprepare")}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=5)
