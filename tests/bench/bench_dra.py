"""NodePrepareResources and NodeUnprepareResources of a node in mode dra, over its socket: one at a time, and 40 at once.

`python -m tests.bench.bench_dra [--rounds N]` prints one JSON object. The times are those of the agent's part of a call, from request to
answer, without the read of the claim from the API server: checks, durable commit, CDI spec. `claim_read` is that read by itself, from the
simulated API server on loopback, with TLS as on a node and eight kept connections.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from gpumgr.agent.answers import Answers
from gpumgr.agent.claims import NodeClaims
from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.device_lists import DeviceListPublisher
from gpumgr.agent.state import AgentState
from gpumgr.allocator.answer import HostPaths
from gpumgr.allocator.claims import AllocatedClaim, ClaimRef, ClaimShare, device_name
from gpumgr.allocator.ledger import Ledger
from gpumgr.allocator.pods import ClaimUse, PodView
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.dra.service import DraPlugin
from gpumgr.enforcement import cdi
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.unlimited import Unlimited
from gpumgr.metrics.registry import Metrics
from gpumgr.rpc.unix_server import UnixServer
from tests.bench import figures
from tests.bench.bench_metrics import node_snapshot
from tests.bench.figures import spread
from tests.component.dra.harness import channel_to
from tests.component.stage.stage import MemoryPods
from tests.kubelet_api import dra

CLAIMS = 40


class Reader:
    """Answers at once."""

    def __init__(self) -> None:
        self.claims: dict[str, AllocatedClaim] = {}

    async def read(self, claim: ClaimRef) -> AllocatedClaim:
        return self.claims[claim.uid]


class Node:
    """Make it inside the event loop."""

    def __init__(self, folder: Path) -> None:
        pods, metrics = MemoryPods(), Metrics(node="bench", version="0")
        self.checkpoint = SqliteCheckpoint.open(folder / "checkpoint")
        self.state = AgentState(
            Ledger(),
            checkpoint=self.checkpoint,
            device_lists=DeviceListPublisher(lambda _offer: None, clock=time.monotonic),
            meter=metrics,
            runs=lambda _process: False,
            policy="binpack",
            clock=time.monotonic,
        )
        self.limits = Enforcer(
            [Unlimited(lambda *_: None)],
            setting="none",
            overrides=(),
            cdi_dir=folder / "cdi",
            inject_by_cdi=True,
            orphan_grace_seconds=60,
            clock=time.monotonic,
        )
        host = HostPaths(exists=os.path.exists, allocation_dir=str(folder / "vm"))
        starts = ContainerStarts(
            agent_state=self.state,
            pods=pods,
            enforcement=self.limits,
            answers=Answers(agent_state=self.state, pods=pods, enforcement=self.limits, host=host),
            allocation_dir=host.allocation_dir,
            make_dir=lambda path: os.makedirs(path, exist_ok=True),
        )
        self.pods, self.reader = pods, Reader()
        self.claims = NodeClaims(
            agent_state=self.state,
            reader=self.reader,
            pods=pods,
            enforcement=self.limits,
            starts=starts,
            pool="bench",
            cdi_name=cdi.device_name,
        )
        self._seconds: list[float] = []
        self.server = UnixServer(folder / "dra.sock", [DraPlugin(self.claims, self._observe)])

    def _observe(self, _rpc: str, outcome: str, seconds: float) -> None:
        assert outcome == "ok", outcome
        self._seconds.append(seconds)

    def take(self) -> Sequence[float]:
        """The durations of the calls since the last take."""
        taken, self._seconds = self._seconds, []
        return taken

    def claim(self, number: int) -> Any:
        """A tenth of a GPU; ten lie on each."""
        gpu = self.state.ledger.gpu_registry.gpus[number // 10].name
        ref = ClaimRef(namespace="bench", name=f"claim-{number}", uid=f"uid-{number}")
        pod = PodView(
            namespace="bench", name=f"pod-{number}", uid=f"pod-{number}", claims=(ClaimUse(container="main", claim=ref.name),)
        )
        self.pods.views[pod.key] = pod
        share = ClaimShare(request="gpu", device=device_name(gpu), share_id=f"s{number}", cores=10, memory_mebibytes=1024)
        self.reader.claims[ref.uid] = AllocatedClaim(ref=ref, pods=((pod.key, pod.uid),), shares=(share,))
        return dra.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid)


async def measure(*, rounds: int) -> Mapping[str, Any]:
    taken: dict[str, list[Sequence[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        await node.state.set_snapshot(node_snapshot())
        await node.server.start()
        claims = [node.claim(number) for number in range(CLAIMS)]
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
