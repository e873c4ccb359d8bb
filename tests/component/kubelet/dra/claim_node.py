"""Claims on real parts without a kubelet: the durable ledger, the CDI specs, and the service on its socket."""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpumgr.agent.claims import ClaimReader, NodeClaims
from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.rpc.unix_server import UnixServer
from gpumgr.enforcement.backend import Unlimited
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.kubelet.records import stored_nodes
from gpumgr.ledger.answer import HostPaths
from gpumgr.ledger.claims import AllocatedClaim, ClaimShare, device_name
from gpumgr.ledger.ledger import ClaimRef, Ledger
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.placement.pods import ClaimUse, PodKey, PodView
from gpumgr.settings.schema import EnforcementSettings
from tests.component.stage.stage import MemoryPods, no_bursts


class Reader:
    """Answers at once."""

    def __init__(self) -> None:
        self.claims: dict[str, AllocatedClaim] = {}

    async def read(self, claim: ClaimRef, *, deadline: float | None = None) -> AllocatedClaim:  # noqa: ARG002
        return self.claims[claim.uid]

    async def needs_claims(self, pod: PodKey, uid: str, *, deadline: float | None = None) -> bool:  # noqa: ARG002
        return True


class ClaimNode:
    """Make it inside the event loop. `reader`: another one than that of the claims that it has itself."""

    def __init__(self, folder: Path, reader: ClaimReader | None = None) -> None:
        pods = MemoryPods()
        self.checkpoint = SqliteCheckpoint.open(folder / "checkpoint")
        self.state = AgentState(
            Ledger(),
            checkpoint=self.checkpoint,
            device_lists=DeviceListPublisher(lambda _offer: None, clock=time.monotonic),
            runs=lambda _process: False,
            clock=time.monotonic,
        )
        self.limits = Enforcer(
            [Unlimited(lambda *_: None)],
            EnforcementSettings(backend="none", cdi_dir=folder / "cdi", injection="cdi"),
            clock=time.monotonic,
        )
        host = HostPaths(exists=os.path.exists, allocation_dir=str(folder / "vm"))
        starts = ContainerStarts(
            agent_state=self.state,
            pods=pods,
            enforcement=self.limits,
            host=host,
            make_dir=lambda path: os.makedirs(path, exist_ok=True),
            make_room=no_bursts,
            stored_nodes=partial(stored_nodes, folder),
        )
        self.pods, self.reader = pods, Reader()
        self.claims = NodeClaims(
            agent_state=self.state, reader=reader or self.reader, pods=pods, enforcement=self.limits, starts=starts
        )
        self._seconds: list[float] = []
        plugin = DraPlugin("bench")
        plugin.decide_with(self.claims)
        plugin.observe = self._observe
        self.server = UnixServer(folder / "dra.sock", [plugin])

    def _observe(self, _rpc: str, outcome: str, seconds: float) -> None:
        assert outcome == "ok", outcome
        self._seconds.append(seconds)

    def take(self) -> Sequence[float]:
        """The durations of the calls since the last take."""
        taken, self._seconds = self._seconds, []
        return taken

    def claim(self, number: int) -> ClaimRef:
        """A tenth of a GPU for a pod; ten are on each GPU."""
        gpu = self.state.ledger.gpu_registry.gpus[number // 10].name
        ref = ClaimRef(namespace="bench", name=f"claim-{number}", uid=f"uid-{number}")
        pod = PodView(
            namespace="bench", name=f"pod-{number}", uid=f"pod-{number}", claims=(ClaimUse(container="main", claim=ref.name),)
        )
        self.pods.views[pod.key] = pod
        share = ClaimShare(request="gpu", device=device_name(gpu), share_id=f"s{number}", cores=10, memory_mebibytes=1024)
        self.reader.claims[ref.uid] = AllocatedClaim(ref=ref, pods=((pod.key, pod.uid),), shares=(share,))
        return ref
