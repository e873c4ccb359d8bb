"""The ledger and the inventory in force, and the one lock. Each change of the ledger is saved, then applied, then sent to the kubelet.

`DeviceListPublisher` decides when a changed device list is sent, and which ids the kubelet must have received by now. ListAndWatch has no
acknowledgement, so an id that turned Healthy counts as visible one second after it was sent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import structlog
from msgspec.structs import replace

from gpumgr.agent.history import History, about
from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.agent.ports import Checkpoint, Publish, Runs
from gpumgr.common.errors import CheckpointError, LedgerError
from gpumgr.common.units import GpuName, Process
from gpumgr.ledger import quarantine
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import Masks
from gpumgr.ledger.ledger import Allocation, AllocationId, Change, Ledger
from gpumgr.ledger.node import NodeDevices, NodeView
from gpumgr.ledger.quarantine import EXPECTED_SECONDS, Quarantine
from gpumgr.ledger.suspension import Suspension, SuspensionsById
from gpumgr.ledger.tables import DELETE_IT, decode_note, encode_note
from gpumgr.placement.devices import NodeSample, NodeSnapshot
from gpumgr.placement.select import Policy

log = structlog.get_logger(__name__)

#: The kubelet allocates a container's memory within this time after its cores, or not at all.
OPEN_SECONDS = 5.0
#: How long a request that would be refused waits, so that the kubelet can read a new list. The kubelet needs milliseconds for that.
PUBLISH_SECONDS = 0.1
#: A list in which only memory blocks have changed is sent at least this long after the one before it. Blocks count as visible this long
#: after they were sent.
SETTLE_SECONDS = 1.0
QUARANTINE_NOTE = "quarantine"
SUSPENSIONS_NOTE = "suspensions"


class DeviceListPublisher:
    """`publish` sends a list to the kubelet. `clock` is monotonic, in seconds."""

    def __init__(self, publish: Publish, *, clock: Callable[[], float]) -> None:
        self._publish = publish
        self._clock = clock
        self._sent: NodeDevices = ()
        #: GPU -> the blocks that were visible when a change of the GPU's ids was last sent.
        self._seen_before: dict[GpuName, int] = {}
        #: GPU -> when that change was sent.
        self._changed_at: dict[GpuName, float] = {}
        self._sent_at = float("-inf")
        self._held_back: NodeDevices | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listening = False

    def start(self) -> None:
        """Call it when the servers that the kubelet watches have started. No list is sent before."""
        self._listening = True
        self._send()

    def update(self, new: NodeDevices) -> None:
        """Sends this device list: at once if it is `_urgent`, else at most SETTLE_SECONDS later."""
        if new == self._sent:
            self._held_back = None
            return
        self._held_back = new
        if not self._listening:
            return
        wait = 0.0 if self._urgent(new) else self._sent_at + SETTLE_SECONDS - self._clock()
        if wait <= 0:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._send)

    def hurry(self) -> bool:
        """Sends a list that is held back. Returns whether the last sent list has Healthy blocks that do not count as visible yet."""
        self._send()
        visible = self.visible_blocks()
        return any(each.healthy_blocks & ~visible[each.gpu.name] for each in self._sent)

    def visible_blocks(self, settle_seconds: float = SETTLE_SECONDS) -> Masks:
        """The memory blocks that have been Healthy in the sent lists for `settle_seconds` or longer."""
        now = self._clock()
        result = {}
        for each in self._sent:
            gpu = each.gpu.name
            settled = now - self._changed_at.get(gpu, float("-inf")) >= settle_seconds
            result[gpu] = each.healthy_blocks if settled else each.healthy_blocks & self._seen_before[gpu]
        return result

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _urgent(self, new: NodeDevices) -> bool:
        """Whether more than memory blocks has changed."""

        def others(devices: NodeDevices) -> list[object]:
            return [(each.gpu, each.healthy_cores, each.healthy_replicas, each.healthy_instances) for each in devices]

        return others(new) != others(self._sent)

    def _send(self) -> None:
        self.close()
        if self._held_back is None:
            return
        now, visible = self._clock(), self.visible_blocks()
        sent = {each.gpu.name: each for each in self._sent}
        for each in self._held_back:
            gpu = each.gpu.name
            if gpu in sent and sent[gpu] != each:
                self._seen_before[gpu], self._changed_at[gpu] = visible[gpu], now
        self._sent, self._held_back, self._sent_at = self._held_back, None, now
        self._publish(self._sent)


class AgentState:
    """All state of the agent. Each change needs `lock`. Only removals, reservations and corrected names may be in force before they are on
    disk; the next commit saves them. If a method raises CheckpointError, nothing has changed.

    `before_offer` is awaited under `lock` before listed GPUs are offered. `on_freed` gets the id of each removed allocation. `inventory`
    has the settings, but no GPUs yet.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        checkpoint: Checkpoint,
        device_lists: DeviceListPublisher,
        runs: Runs,
        clock: Callable[[], float],
        on_freed: Callable[[AllocationId], None] = lambda _: None,
        before_offer: Callable[[], Awaitable[None]] | None = None,
        inventory: Inventory | None = None,
    ) -> None:
        self.lock = asyncio.Lock()
        self.history = History(checkpoint, wall_clock=time.time)
        # Drops reservations from before a restart, because the kubelet never got an answer about them.
        self.ledger = ledger.free(a.id for a in ledger.allocations.values() if a.reserved)
        self.inventory = inventory or Inventory()
        #: The containers with a suspension; also on disk.
        self.suspensions: SuspensionsById = {}
        self._durable = ledger
        self._checkpoint, self._device_lists, self._runs, self._clock = checkpoint, device_lists, runs, clock
        #: An allocation of whole GPUs for which the kubelet may still allocate memory, and until when.
        self._open: tuple[AllocationId, float] | None = None
        #: The quarantine's note on disk.
        self._noted = ""
        #: GPU -> when it went into quarantine, in monotonic seconds; None: the quarantine was logged.
        self._held_since: dict[GpuName, float | None] = {}
        self._on_freed, self._before_offer = on_freed, before_offer

    def apply(self, *, policy: Policy) -> None:
        self.inventory = replace(self.inventory, policy=policy)

    def node(self) -> NodeView:
        return self.inventory.view(self.ledger.gpu_registry, visible_blocks=self._device_lists.visible_blocks())

    async def node_with_pending_blocks(self) -> NodeView | None:
        """Sends the kubelet at once all memory blocks that can be offered, and returns the node with them; None if the kubelet has them
        already. Use it for a request that would be refused: if the blocks arrive too late, the kubelet refuses the pod itself."""
        self.publish()
        if not self._device_lists.hurry():
            return None
        await asyncio.sleep(PUBLISH_SECONDS)
        return self.inventory.view(self.ledger.gpu_registry, visible_blocks=self._device_lists.visible_blocks(0))

    async def commit(self, ledger: Ledger, *entries: HistoryEntry) -> None:
        """Makes `ledger` durable, with the history's `entries` in the same transaction, then applies it. Raises CheckpointError, also for a
        ledger that contradicts itself (LedgerError)."""
        change = ledger.since(self._durable)
        _refuse_violations(ledger, change)
        numbered = tuple(self.history.numbered(entry) for entry in entries)
        change = replace(change, entries=numbered)
        if change:
            await self._checkpoint.save(change)
            self._durable = ledger
        self._apply(ledger)
        for entry in numbered:
            self.history.add(entry, saved=True)

    async def change(self, decide: Callable[[Ledger], tuple[Ledger, Iterable[HistoryEntry]]]) -> None:
        """Commits what `decide` makes of the ledger. Raises CheckpointError."""
        async with self.lock:
            ledger, entries = decide(self.ledger)
            await self.commit(ledger, *entries)
            self.publish()

    def put(self, ledger: Ledger) -> None:
        """Applies `ledger`, which the next commit makes durable. Raises LedgerError; then nothing has changed."""
        _refuse_violations(ledger, ledger.since(self.ledger))
        self._apply(ledger)

    def withdraw(self, reserved: Allocation) -> None:
        """Removes a reservation if it is still there, without a report, because it was never granted."""
        if (there := self.ledger.allocations.get(reserved.id)) is not None and there.reserved:
            self.ledger = self.ledger.free([reserved.id])

    def _apply(self, ledger: Ledger) -> None:
        """Puts `ledger` in force, reports freed allocations, and checks GPUs without a holder for remaining processes."""
        for a in ledger.freed_since(self.ledger):
            log.info("allocation_freed", allocation=a.id, holder=a.describe(), gpus=tuple(a.gpus))
            seconds = max(0, round(self.history.now() - a.granted_at))
            self.history.add(about(a, HistoryEntry(what="freed", why=f"held for {seconds} s")))
        for allocation in self.ledger.allocations.keys() - ledger.allocations.keys():
            self._on_freed(allocation)
        left = self.ledger.occupied - ledger.occupied
        self.ledger = ledger
        if left:
            self._set_quarantine(quarantine.ended(self.inventory.quarantine, left, self._runs))

    def publish(self) -> None:
        open_ids = (self._open[0],) if self._open else ()
        self._device_lists.update(self.inventory.node_devices(self.ledger, open_ids))

    def leave_open(self, allocation: AllocationId) -> None:
        """For OPEN_SECONDS the kubelet may allocate the memory of this allocation of whole GPUs."""
        self._open = (allocation, self._clock() + OPEN_SECONDS)

    def close_open(self) -> None:
        self._open = None

    def expire_open(self) -> None:
        if self._open is not None and self._clock() >= self._open[1]:
            self._open = None

    def is_open(self, allocation: AllocationId) -> bool:
        return self._open is not None and self._open[0] == allocation

    async def set_snapshot(self, snapshot: NodeSnapshot, health: HardwareHealth | None = None) -> None:
        """Puts the listed GPUs and their health in force (None: as before). New GPUs are registered on disk before they are offered; if
        that fails, a later `register_gpus` must succeed first."""
        async with self.lock:
            self.inventory = replace(self.inventory, snapshot=snapshot, health=health or self.inventory.health)
            try:
                await self.register_gpus()
            except CheckpointError as error:
                log.error("gpus_not_remembered", error=str(error), consequence="GPUs that are new here are not offered")
            await self.prepare_offer()
            self.publish()

    async def register_gpus(self) -> None:
        """Registers the snapshot's GPUs. The caller holds `lock`. Raises CheckpointError."""
        await self.commit(self.ledger.with_gpu_registry(self.inventory.register(self.ledger.gpu_registry)))

    async def forget_gpu(self, name: GpuName, entry: HistoryEntry) -> None:
        """Drops a registered GPU unless it has allocations. Raises CheckpointError."""
        async with self.lock:
            if not self.ledger.on(name):
                await self.commit(self.ledger.with_gpu_registry(self.ledger.gpu_registry.without(name)), entry)
                self.publish()

    async def prepare_offer(self) -> None:
        """Call it between `register_gpus` and `publish`. The caller holds `lock`."""
        if self.inventory.snapshot.gpus and self._before_offer is not None:
            await self._before_offer()

    async def set_health(self, health: HardwareHealth) -> None:
        async with self.lock:
            self.inventory = replace(self.inventory, health=health)
            self.publish()

    async def change_inventory(self, **fields: Any) -> None:
        if any(getattr(self.inventory, name) != value for name, value in fields.items()):
            async with self.lock:
                self.inventory = replace(self.inventory, **fields)
                self.publish()

    def restore_suspensions(self, notes: Mapping[str, str]) -> None:
        """Raises CheckpointError for a note that can't be read."""
        self.suspensions = decode_note(notes, SUSPENSIONS_NOTE, dict[AllocationId, Suspension])

    async def set_suspension(self, allocation: AllocationId, suspension: Suspension | None) -> None:
        """Saves and applies the state of one allocation; None: it runs. Raises CheckpointError."""
        async with self.lock:
            changed = {name: each for name, each in self.suspensions.items() if name != allocation}
            if suspension is not None:
                changed[allocation] = suspension
            await self._checkpoint.save_note(SUSPENSIONS_NOTE, encode_note(changed))
            self.suspensions = changed

    async def set_sample(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        """Updates the quarantine. `started`: pid -> start time in clock ticks since boot, for the processes that run."""
        async with self.lock:
            processes = self.inventory.processes(self.ledger.gpu_registry, sample, started)
            state = quarantine.sampled(self.inventory.quarantine, processes, self.ledger.occupied)
            self._set_quarantine(quarantine.released(state, self._runs))

    def restore_quarantine(self, notes: Mapping[str, str]) -> None:
        """Call it once the ledger is complete: restores the `held` and `unattributed` processes of the quarantine that still run, then
        evaluates the sampled processes again. Raises CheckpointError for a note that can't be read."""
        self._noted = notes.get(QUARANTINE_NOTE, "")
        kept = decode_note(notes, QUARANTINE_NOTE, dict[str, dict[GpuName, frozenset[Process]]], remedy=DELETE_IT)
        state, seen = Quarantine(held=kept.get("held", {}), unattributed=kept.get("unattributed", {})), self.inventory.quarantine
        processes = {
            gpu: seen.tenants.get(gpu, frozenset()) | seen.unattributed.get(gpu, frozenset())
            for gpu in {*seen.tenants, *seen.unattributed}
        }
        state = quarantine.sampled(state, processes, self.ledger.occupied)
        self._held_since = dict.fromkeys(state.held, float("-inf"))  # its start is not known
        self._set_quarantine(quarantine.released(state, self._runs))

    async def note_quarantine(self) -> None:
        """Saves the quarantine for the next start. If it did not save the unattributed processes, a display server would count as a
        container's process after a restart, and keep its GPU in quarantine. Raises CheckpointError."""
        state = self.inventory.quarantine
        kept = {"held": state.held, "unattributed": state.unattributed}
        note = encode_note(kept)
        if note != self._noted and (self._noted or any(kept.values())):
            await self._checkpoint.save_note(QUARANTINE_NOTE, note)
            self._noted = note

    async def save_note(self, key: str, value: str, *entries: HistoryEntry) -> None:
        """Saves a note, with the history's `entries` in the same transaction. Raises CheckpointError."""
        numbered = tuple(self.history.numbered(entry) for entry in entries)
        await self._checkpoint.save_note(key, value, numbered)
        for entry in numbered:
            self.history.add(entry, saved=True)

    def _set_quarantine(self, state: Quarantine) -> None:
        before, now = self.inventory.quarantine, self._clock()
        if state != before:  # an unchanged inventory must stay the same object: it caches results
            self.inventory = replace(self.inventory, quarantine=state)
        self._held_since = {**dict.fromkeys(state.held, now), **self._held_since}
        for gpu in self._held_since.keys() - state.held.keys():
            if self._held_since.pop(gpu) is None:
                log.info("gpu_released", gpu=gpu, reason="the processes of the ended pod are gone")
        for gpu, since in self._held_since.items():
            if since is not None and now - since >= EXPECTED_SECONDS:
                self._held_since[gpu] = None
                log.warning("gpu_quarantined", gpu=gpu, reason=state.reason(gpu))
        if state.held != before.held:
            self.publish()


def _refuse_violations(ledger: Ledger, change: Change) -> None:
    if broken := ledger.violations(change.put):
        raise LedgerError(f"the ledger would contradict itself: {'; '.join(broken)}")
