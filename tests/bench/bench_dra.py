"""NodePrepareResources and NodeUnprepareResources of a node in mode dra, over its socket: one at a time, and 40 at once.

`python -m tests.bench.bench_dra [--rounds N]` prints one JSON object. The times are those of the agent's part of a call, from request to
answer, without the read of the claim from the API server: checks, durable commit, CDI spec. `claim_read` is that read by itself, from the
simulated API server on loopback, with TLS as on a node and eight kept connections.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tests.bench import figures
from tests.bench.bench_metrics import node_snapshot
from tests.bench.figures import spread
from tests.component.dra.claim_node import ClaimNode
from tests.component.dra.harness import channel_to
from tests.kubelet_api import dra

CLAIMS = 40


async def measure(*, rounds: int) -> Mapping[str, Any]:
    taken: dict[str, list[Sequence[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        node = ClaimNode(Path(folder))
        await node.state.set_snapshot(node_snapshot())
        await node.server.start()
        refs = [node.claim(number) for number in range(CLAIMS)]
        claims = [dra.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in refs]
        async with channel_to(node.server.path) as channel:

            async def call(rpc: str, claim: Any) -> None:
                message = getattr(dra, f"Node{rpc}ResourcesRequest")(claims=[claim])
                method = channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/Node{rpc}Resources")
                await method(message.SerializeToString(), timeout=60)

            for _ in range(rounds):
                for rpc in ("Prepare", "Unprepare"):
                    for claim in claims:
                        await call(rpc, claim)
                    taken.setdefault(f"{rpc.lower()}_one_at_a_time", []).append(node.take())
                for rpc in ("Prepare", "Unprepare"):
                    await asyncio.gather(*(call(rpc, claim) for claim in claims))
                    taken.setdefault(f"{rpc.lower()}_{CLAIMS}_at_once", []).append(node.take())
        await node.server.drain(1.0)
        await node.checkpoint.close()
    return {name: spread(found) for name, found in taken.items()}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=5)
