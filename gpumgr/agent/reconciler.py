"""Between the kubelet's calls: freeing what pods left, learning what the kubelet knows and the ledger does not."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import structlog

from gpumgr.agent.admission import Admission
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.allocator.ledger import AllocationId, Ledger
from gpumgr.allocator.pods import PodKey
from gpumgr.allocator.rebuild import KubeletEntry, Rebuilt, adopt
from gpumgr.allocator.sweep import sweep
from gpumgr.errors import CheckpointError
from gpumgr.units import GpuName

log = structlog.get_logger(__name__)

#: `List` harms the kubelet between an Allocate's choice and its entry in the kubelet's table (design: free when the kubelet frees).
GAP_SECONDS = 0.5
#: How long a container start waits for a moment in which `List` is allowed.
LEARN_SECONDS = 10.0
#: The Allocate that follows a preference comes at once; if it has not come by now, it will not.
UNDER_WAY_SECONDS = 2.0
SWEEP_SECONDS = 5.0
#: After a start (ours or the kubelet's) `List` is incomplete until the kubelet's sources are ready.
INCOMPLETE_SECONDS = 30.0
PATIENCE = 2
PATIENCE_WHILE_INCOMPLETE = 6


class Reconciler:
    """Sweeps every few seconds, and soon after a pod ended."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        admission: Admission,
        pods: Pods,
        new_id: Callable[[], AllocationId],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._agent_state, self._admission, self._pods = agent_state, admission, pods
        self.new_id, self._clock, self._wall_clock = new_id, clock, wall_clock
        self._find_uid = partial(find_pod, pods, None)
        self._absent: Mapping[AllocationId, int] = {}
        self._quiet_until = float("-inf")
        self._incomplete_until = clock() + INCOMPLETE_SECONDS
        self._wake = asyncio.Event()

    def preferred(self) -> None:
        """A preference is being answered; its Allocate is under way: no `List` until that is answered."""
        self._quiet_until = self._clock() + UNDER_WAY_SECONDS

    def answered(self) -> None:
        """An Allocate is being answered: no `List` for a moment."""
        self._quiet_until = self._clock() + GAP_SECONDS

    def kubelet_restarted(self) -> None:
        self._incomplete_until = self._clock() + INCOMPLETE_SECONDS
        self._absent = {}
        self._admission.kubelet_restarted(INCOMPLETE_SECONDS)

    def soon(self) -> None:
        """A pod ended: sweep without waiting for the next round."""
        self._wake.set()

    async def run(self) -> None:
        """Sweeps for ever."""
        wait = SWEEP_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                    await asyncio.sleep(GAP_SECONDS)  # pods often end together, and `List` is no toy
            self._wake.clear()
            try:
                done = await self.sweep()
                await self._agent_state.note_quarantine()
            except CheckpointError as error:
                log.error("sweep_not_remembered", error=str(error))
                done = True
            wait = GAP_SECONDS if not done else (1.0 if self._absent else SWEEP_SECONDS)

    async def sweep(self) -> bool:
        """One look at who is still there. False if it must wait because an Allocate is under way, or was a moment ago."""
        agent_state = self._agent_state
        async with agent_state.lock:
            agent_state.expire_open()
            await agent_state.register_gpus()
            await agent_state.prepare_offer()
            agent_state.publish()
            if self._clock() < self._quiet_until:
                return False
            if not agent_state.ledger.allocations:
                self._absent = {}
                return True
            listing = await self._admission.list_pods()
            if listing is None:
                return True
            synced = self._pods.synced
            incomplete = self._clock() < self._incomplete_until
            swept = sweep(
                agent_state.ledger,
                listing,
                self._pods.get,
                self._find_uid,
                absent=self._absent,
                patience=PATIENCE_WHILE_INCOMPLETE if incomplete else PATIENCE,
                gone=lambda uid: synced and self._find_uid(uid) is None,
            )
            self._absent = swept.absent
            for a in swept.renamed:
                log.warning("allocation_renamed", allocation=a.id, holder=a.describe(), reason="PodResources names this pod")
            agent_state.meter.drifted("freed", len(swept.freed))
            agent_state.meter.drifted("renamed", len(swept.renamed))
            await agent_state.commit(swept.ledger)
            agent_state.publish()
            return True

    async def adopt(self, entries: Iterable[KubeletEntry]) -> Rebuilt:
        """Takes into the ledger what the kubelet remembers and the ledger does not (at start, after a lost checkpoint)."""
        async with self._agent_state.lock:
            rebuilt = await self.adopt_locked(entries)
            self._agent_state.publish()
            return rebuilt

    async def learn(self) -> None:
        """Finds the pod of a container that starts and holds ids under no known name, by PodResources. Waits until no other
        Allocate is expected, for LEARN_SECONDS at most; then the start is refused, and the kubelet retries it."""
        give_up_at = self._clock() + LEARN_SECONDS
        while self._clock() < give_up_at:
            await asyncio.sleep(min(GAP_SECONDS, max(0.0, self._quiet_until - self._clock())))
            async with self._agent_state.lock:
                if self._clock() < self._quiet_until:
                    continue  # a preference was answered while this call waited for the lock
                await self.adopt_locked(())
                self._agent_state.publish()
                return

    async def adopt_locked(self, entries: Iterable[KubeletEntry]) -> Rebuilt:
        """As `adopt`, but the kubelet is not told. The caller holds the books' lock."""
        ledger = self._agent_state.ledger
        listing = await self._admission.list_pods()
        if listing is not None:
            # Names only: with this much patience nothing is freed.
            ledger = sweep(ledger, listing, self._pods.get, self._find_uid, absent={}, patience=2**31).ledger
        rebuilt = adopt(ledger, entries, listing, self._find_uid, new_id=self.new_id, now=self._wall_clock())
        await self._settle(rebuilt)
        return rebuilt

    async def migrate(self, plan: Callable[[Ledger, Mapping[int, GpuName]], Rebuilt]) -> Rebuilt:
        """Commits what `plan` makes of the ledger and the device minors of its GPUs (records of gpu-manager). The caller holds the
        books' lock."""
        gpus = self._agent_state.inventory.gpus(self._agent_state.ledger.gpu_registry)
        rebuilt = plan(self._agent_state.ledger, {gpu.minor: name for name, gpu in gpus.items() if gpu.minor is not None})
        await self._settle(rebuilt)
        self._agent_state.publish()
        return rebuilt

    async def name(self, pods: Mapping[str, PodKey]) -> None:
        """Gives allocations that only a UID is known of their pods' names (UID -> pod). The caller holds the books' lock."""
        ledger = self._agent_state.ledger
        for a in ledger.allocations.values():
            if a.pod is None and a.uid is not None and a.uid in pods:
                ledger = ledger.occupy(replace(a, pod=pods[a.uid]))
        await self._agent_state.commit(ledger)

    async def _settle(self, rebuilt: Rebuilt) -> None:
        for a in rebuilt.added:
            log.warning(
                "allocation_adopted", allocation=a.id, holder=a.describe(), gpus=tuple(a.gpus), cores=a.cores, reason=a.why
            )
        for problem in rebuilt.problems:
            log.error("allocation_not_adopted", problem=problem)
        self._agent_state.meter.drifted("adopted", len(rebuilt.added))
        self._agent_state.meter.drifted("rejected", len(rebuilt.problems))
        await self._agent_state.commit(rebuilt.ledger)
