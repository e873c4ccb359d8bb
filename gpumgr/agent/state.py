"""The ledger and the inventory in force, the one lock, and the way from a decision to disk, memory and kubelet."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import structlog

from gpumgr.agent.device_lists import DeviceListPublisher
from gpumgr.agent.history import History, about
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.ports import Checkpoint, Meter, Runs
from gpumgr.allocator import quarantine
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import AllocationId, Change, Ledger
from gpumgr.allocator.node import NodeView
from gpumgr.allocator.quarantine import Quarantine
from gpumgr.errors import CheckpointError, LedgerError
from gpumgr.evaluators.select import Policy
from gpumgr.topology.devices import NodeSample, NodeSnapshot

log = structlog.get_logger(__name__)

#: A container whose memory call has not come this long after its core call will not make it.
OPEN_SECONDS = 5.0
#: The kubelet reads a ListAndWatch message within milliseconds; no pod but the one that would be refused waits for it.
PUBLISH_SECONDS = 0.1
QUARANTINE_NOTE = "quarantine"


class AgentState:
    """All state of the agent. Whoever changes it holds `lock`.

    `ledger` may be ahead of the disk by frees only (nobody sees those before the next grant, which is committed with them).
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        checkpoint: Checkpoint,
        device_lists: DeviceListPublisher,
        meter: Meter,
        runs: Runs,
        policy: Policy,
        clock: Callable[[], float],
        history: History | None = None,
        on_freed: Callable[[AllocationId], None] = lambda _: None,
        before_offer: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.lock = asyncio.Lock()
        self.history = history or History(checkpoint, wall_clock=time.time)
        self.ledger = ledger
        self.inventory = Inventory()
        self.meter = meter
        self._durable = ledger
        self._checkpoint, self._device_lists, self._runs, self._clock = checkpoint, device_lists, runs, clock
        self._policy = policy
        self._open: tuple[AllocationId, float] | None = None
        self._noted = ""
        self._on_freed, self._before_offer = on_freed, before_offer

    def apply(self, *, policy: Policy) -> None:
        """Counts from the next decision on."""
        self._policy = policy

    def node(self) -> NodeView:
        return self.inventory.view(
            self.ledger.gpu_registry, policy=self._policy, visible_blocks=self._device_lists.visible_blocks()
        )

    async def node_with_pending_blocks(self) -> NodeView | None:
        """The node with all blocks that can be offered, after telling the kubelet of them at once; None if it knows them all.

        For a request that fits nowhere else: if the kubelet has not heard in time, it refuses the pod itself.
        """
        self.publish()
        if not self._device_lists.hurry():
            return None
        await asyncio.sleep(PUBLISH_SECONDS)
        return self.inventory.view(
            self.ledger.gpu_registry, policy=self._policy, visible_blocks=self._device_lists.visible_blocks(0)
        )

    async def commit(self, ledger: Ledger, *, telling: Entry | None = None) -> None:
        """Makes `ledger` durable, then applies it. `telling` is the history entry to write in the same transaction.

        Raises CheckpointError, also for a ledger that contradicts itself (LedgerError); then nothing has changed.
        """
        change = ledger.since(self._durable)
        _refuse_violations(ledger, change)
        if telling is not None:
            telling = self.history.numbered(telling)
            change = replace(change, entries=(telling,))
        if change:
            await self._checkpoint.save(change)
            self._durable = ledger
        self._apply(ledger)
        if telling is not None:
            self.history.add(telling, saved=True)

    def put(self, ledger: Ledger) -> None:
        """Applies `ledger`, which the next commit makes durable. Raises LedgerError, and then nothing has changed."""
        _refuse_violations(ledger, ledger.since(self.ledger))
        self._apply(ledger)

    def _apply(self, ledger: Ledger) -> None:
        """Logs what was freed, and checks GPUs without a holder for remaining processes."""
        for a in ledger.freed_since(self.ledger):
            log.info(
                "allocation_freed",
                allocation=a.id,
                holder=a.describe(),
                gpus=tuple(a.gpus),
                cores=a.cores,
                memory_mebibytes=a.memory_mebibytes,
            )
            seconds = max(0, round(self.history.now() - a.granted_at))
            self.history.add(about(a, Entry(what="freed", why=f"held for {seconds} s")))
        for allocation in self.ledger.allocations.keys() - ledger.allocations.keys():
            self._on_freed(allocation)
        left = self.ledger.occupied - ledger.occupied
        self.ledger = ledger
        if left:
            self._set_quarantine(quarantine.ended(self.inventory.quarantine, left, self._runs))

    def publish(self) -> None:
        """Offers the kubelet what the books say now."""
        open_ids = (self._open[0],) if self._open else ()
        self._device_lists.update(self.inventory.node_devices(self.ledger, open_ids))

    # -- a whole-GPU container's memory call may still come ------------------------------------------------------------------

    def leave_open(self, allocation: AllocationId) -> None:
        self._open = (allocation, self._clock() + OPEN_SECONDS)

    def close_open(self, *, unless: AllocationId | None = None) -> None:
        if self._open is not None and self._open[0] != unless:
            self._open = None

    def expire_open(self) -> None:
        if self._open is not None and self._clock() >= self._open[1]:
            self._open = None

    def is_open(self, allocation: AllocationId) -> bool:
        return self._open is not None and self._open[0] == allocation

    # -- the driver's news -------------------------------------------------------------------------------------------------

    async def set_snapshot(self, snapshot: NodeSnapshot) -> None:
        """The driver shows these GPUs now. Newcomers get a name, which is durable before the kubelet hears it.

        Where it can't be made durable, the newcomers are not offered until `meet_newcomers` could.
        """
        async with self.lock:
            self.inventory = self.inventory.with_snapshot(snapshot)
            try:
                await self.register_gpus()
            except CheckpointError as error:
                log.error("gpus_not_remembered", error=str(error), consequence="GPUs that are new here are not offered")
            await self.prepare_offer()
            self.publish()

    async def register_gpus(self) -> None:
        """Raises CheckpointError, and then nothing has changed. The caller holds `lock`."""
        await self.commit(self.ledger.with_gpu_registry(self.inventory.register(self.ledger.gpu_registry)))

    async def prepare_offer(self) -> None:
        """To be called between `register_gpus` and `publish`. The caller holds `lock`."""
        if self.inventory.snapshot.gpus and self._before_offer is not None:
            await self._before_offer()

    async def set_health(self, *, failed: Mapping[str, str], cordoned: Mapping[str, str]) -> None:
        """By UUID: why a GPU does not work, why it takes nothing new. What is in neither works."""
        async with self.lock:
            self.inventory = replace(self.inventory, failed=dict(failed), cordoned=dict(cordoned))
            self.publish()

    async def set_sample(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        """Who runs where. `started` maps a pid to its start time in clock ticks since boot; processes that are gone are not in it."""
        async with self.lock:
            processes = self.inventory.processes(self.ledger.gpu_registry, sample, started)
            state = quarantine.sampled(self.inventory.quarantine, processes, self.ledger.occupied)
            self._set_quarantine(quarantine.released(state, self._runs))

    def restore_quarantine(self, notes: Mapping[str, str]) -> None:
        """After a restart: what was in quarantine before it, and who was no pod's process, as far as they still run."""
        self._noted = notes.get(QUARANTINE_NOTE, "")
        kept = json.loads(self._noted) if self._noted else {}
        held, strangers = (
            {gpu: frozenset((pid, start) for pid, start in who) for gpu, who in kept.get(name, {}).items()}
            for name in ("held", "strangers")
        )
        self._set_quarantine(quarantine.released(Quarantine(held=held, strangers=strangers), self._runs))

    async def note_quarantine(self) -> None:
        """Makes the quarantine outlive a restart. Raises CheckpointError.

        With the strangers: taken for tenants after a restart, a display server would keep its GPU in quarantine for ever.
        """
        state = self.inventory.quarantine
        kept = {"held": state.held, "strangers": state.strangers}
        note = json.dumps({name: {gpu: sorted(who) for gpu, who in gpus.items()} for name, gpus in kept.items()}, sort_keys=True)
        if note != self._noted and (self._noted or any(kept.values())):
            await self._checkpoint.save_note(QUARANTINE_NOTE, note)
            self._noted = note

    def _set_quarantine(self, state: Quarantine) -> None:
        before = self.inventory.quarantine
        self.inventory = replace(self.inventory, quarantine=state)
        for gpu in state.held.keys() - before.held.keys():
            log.warning("gpu_quarantined", gpu=gpu, reason=state.reason(gpu))
        for gpu in before.held.keys() - state.held.keys():
            log.info("gpu_released", gpu=gpu, reason="the processes of the ended pod are gone")
        if state.held != before.held:
            self.publish()


def _refuse_violations(ledger: Ledger, change: Change) -> None:
    if broken := ledger.violations(change.put):
        raise LedgerError(f"the ledger would contradict itself: {'; '.join(broken)}")
