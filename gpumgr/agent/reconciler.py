"""Works between the kubelet's calls: frees the ids of ended pods, and adopts allocations that only the kubelet has."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import structlog
from msgspec.structs import replace

from gpumgr.agent.admission import Admission
from gpumgr.agent.pods import PodEnds, find_pod
from gpumgr.agent.ports import Meter, Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import wait_at_most
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import GpuName
from gpumgr.ledger.callers import next_container
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.ledger.rebuild import KubeletEntry, Rebuilt, adopt
from gpumgr.ledger.sweep import sweep
from gpumgr.placement.pods import Listing, PodKey

log = structlog.get_logger(__name__)

#: `List` is not called for this time after an Allocate, because a call of `List` makes the kubelet rebuild its table of used ids. The new
#: table lacks ids that the kubelet has chosen and not yet entered. Also the delay of a sweep after a pod's end.
GAP_SECONDS = 0.5
#: How long the start of a container waits until `List` may be called.
LEARN_SECONDS = 10.0
#: An Allocate follows its GetPreferredAllocation within this time, or not at all.
UNDER_WAY_SECONDS = 2.0
SWEEP_SECONDS = 5.0
#: For this time after a start of the agent or the kubelet, `List` may lack pods that the kubelet has not read yet.
INCOMPLETE_SECONDS = 30.0
#: How many times in a row `List` must lack an allocation before it is freed.
PATIENCE = 2
PATIENCE_WHILE_INCOMPLETE = 6


class Reconciler:
    def __init__(
        self,
        *,
        agent_state: AgentState,
        admission: Admission,
        pods: Pods,
        pod_ends: PodEnds,
        meter: Meter,
        new_id: Callable[[], AllocationId],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._agent_state, self._admission, self._pods, self._pod_ends = agent_state, admission, pods, pod_ends
        self._meter, self.new_id, self._clock, self._wall_clock = meter, new_id, clock, wall_clock
        self._find_uid = partial(find_pod, pods, None)
        self._absent: Mapping[AllocationId, int] = {}
        self._quiet_until = float("-inf")
        self._incomplete_until = clock() + INCOMPLETE_SECONDS
        self._wake = asyncio.Event()

    def preferred(self) -> None:
        """GetPreferredAllocation is being answered: no `List` until its Allocate is answered, or UNDER_WAY_SECONDS have passed."""
        self._quiet_until = self._clock() + UNDER_WAY_SECONDS

    def reserved(self) -> None:
        """An Allocate waits for MIG devices: no `List` until it is answered."""
        self._quiet_until = float("inf")

    def answered(self) -> None:
        """An Allocate is being answered: no `List` for GAP_SECONDS."""
        self._quiet_until = self._clock() + GAP_SECONDS

    def kubelet_restarted(self) -> None:
        self._incomplete_until = self._clock() + INCOMPLETE_SECONDS
        self._absent = {}
        self._admission.kubelet_restarted(INCOMPLETE_SECONDS)

    def soon(self) -> None:
        """A pod has ended: the next sweep follows in GAP_SECONDS."""
        self._wake.set()

    async def run(self) -> None:
        wait = SWEEP_SECONDS
        while True:
            await wait_at_most(self._wake, wait)
            if self._wake.is_set():
                await asyncio.sleep(GAP_SECONDS)  # pods often end together, and one `List` serves them all
                self._wake.clear()
            try:
                done = await self.sweep()
                await self._agent_state.note_quarantine()
            except CheckpointError as error:
                log.error("sweep_not_remembered", error=str(error))
                done = True
            wait = GAP_SECONDS if not done else (1.0 if self._absent else SWEEP_SECONDS)

    async def sweep(self) -> bool:
        """Frees the allocations of ended pods. False if it must wait for an Allocate."""
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
            listing = await self._admission.listings.list()
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
                kept=await self._kept(listing, incomplete=incomplete),
            )
            self._absent = swept.absent
            for a in swept.renamed:
                log.warning("allocation_renamed", allocation=a.id, holder=a.describe(), reason="PodResources names this pod")
            self._meter.drifted("freed", len(swept.freed))
            self._meter.drifted("renamed", len(swept.renamed))
            await agent_state.commit(swept.ledger)
            agent_state.publish()
            return True

    async def _kept(self, listing: Listing, *, incomplete: bool) -> Collection[AllocationId]:
        """The allocations that the last `List` did not show, but that stay. An allocation stays if its pod runs. If that is not
        known, the allocation stays in three cases: `List` may be incomplete; `List` shows the pod without its ids (the kubelet lost its
        checkpoint); the pod's name is not known, and a listed pod lacks ids."""
        held = self._agent_state.ledger.allocations
        absent = [held[each] for each in self._absent if each in held]
        ended = await self._pod_ends.find(absent) if absent else {}
        unknown = {a.id: a.pod for a in absent if ended[a.id] is None}
        lacking = None in unknown.values() and any(map(self._lacks_ids, listing.pods))
        kept = {each for each, pod in unknown.items() if incomplete or pod in listing.pods or (pod is None and lacking)}
        return kept | {a.id for a in absent if ended[a.id] is False}

    def _lacks_ids(self, pod: PodKey) -> bool:
        view = self._pods.get(pod)
        return view is not None and not view.ended and next_container(self._agent_state.ledger, view) is not None

    async def adopt(self, entries: Iterable[KubeletEntry]) -> Rebuilt:
        """At start, adds the allocations that only the kubelet has. `entries` are from the kubelet's checkpoint. `List` is called only if
        there are no entries, if the ledger lacks an entry, or if the pod of an allocation is not known. Otherwise GPUs are offered at
        once."""
        entries = tuple(entries)
        async with self._agent_state.lock:
            ledger = self._agent_state.ledger
            rebuilt = adopt(ledger, entries, None, self._find_uid, new_id=self.new_id, now=self._wall_clock())
            if (
                not entries
                or rebuilt.ledger != ledger
                or rebuilt.problems
                or any(a.pod is None for a in ledger.allocations.values())
            ):
                rebuilt = await self.adopt_locked(entries)
            self._agent_state.publish()
            return rebuilt

    async def learn(self) -> None:
        """Calls `List` to learn the pod of a starting container, once no Allocate is expected. After LEARN_SECONDS it gives up, and the
        kubelet retries the refused start."""
        give_up_at = self._clock() + LEARN_SECONDS
        while self._clock() < give_up_at:
            await asyncio.sleep(min(GAP_SECONDS, max(0.0, self._quiet_until - self._clock())))
            async with self._agent_state.lock:
                if self._clock() < self._quiet_until:
                    continue  # GetPreferredAllocation was answered while this call waited for the lock
                await self.adopt_locked(())
                self._agent_state.publish()
                return

    async def adopt_locked(self, entries: Iterable[KubeletEntry]) -> Rebuilt:
        """As `adopt`, without publishing. The caller holds the agent state's lock."""
        ledger = self._agent_state.ledger
        listing = await self._admission.listings.list()
        if listing is not None:
            # With this patience, absence from `List` frees nothing. The sweep sets names, and frees what has certainly ended.
            ledger = sweep(ledger, listing, self._pods.get, self._find_uid, absent={}, patience=2**31).ledger
        rebuilt = adopt(ledger, entries, listing, self._find_uid, new_id=self.new_id, now=self._wall_clock())
        await self._commit(rebuilt)
        return rebuilt

    async def migrate(self, plan: Callable[[Ledger, Mapping[int, GpuName]], Rebuilt]) -> Rebuilt:
        """Takes over gpu-manager's records. `plan` gets the ledger, and a map from minor numbers to GPUs. The caller holds the agent
        state's lock."""
        gpus = self._agent_state.inventory.gpus(self._agent_state.ledger.gpu_registry)
        rebuilt = plan(self._agent_state.ledger, {gpu.minor: name for name, gpu in gpus.items() if gpu.minor is not None})
        await self._commit(rebuilt)
        self._agent_state.publish()
        return rebuilt

    async def name(self, pods: Mapping[str, PodKey]) -> None:
        """Sets the pod (`pods`: by UID) of allocations that have only a UID. The caller holds the agent state's lock."""
        ledger = self._agent_state.ledger
        for a in ledger.allocations.values():
            if a.pod is None and a.uid is not None and a.uid in pods:
                ledger = ledger.occupy(replace(a, pod=pods[a.uid]))
        await self._agent_state.commit(ledger)

    async def _commit(self, rebuilt: Rebuilt) -> None:
        for a in rebuilt.added:
            log.warning(
                "allocation_adopted", allocation=a.id, holder=a.describe(), gpus=tuple(a.gpus), cores=a.cores, reason=a.why
            )
        for problem in rebuilt.problems:
            log.error("allocation_not_adopted", problem=problem)
        self._meter.drifted("adopted", len(rebuilt.added))
        self._meter.drifted("rejected", len(rebuilt.problems))
        await self._agent_state.commit(rebuilt.ledger)
