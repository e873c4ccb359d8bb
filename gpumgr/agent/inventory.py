"""What the node has and what of it works: the driver's latest snapshot, every GPU's fitness, and the quarantine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumgr.allocator.answer import GrantedGpu
from gpumgr.allocator.ids import Cards, Masks
from gpumgr.allocator.ledger import AllocationId, Ledger
from gpumgr.allocator.node import NodeView
from gpumgr.allocator.offer import Offer, offer
from gpumgr.allocator.quarantine import Process, Quarantine
from gpumgr.evaluators.select import Policy
from gpumgr.topology.devices import Gpu, GpuFailure, NodeSample, NodeSnapshot, Topology
from gpumgr.units import GpuName

EMPTY = NodeSnapshot(gpus=(), topology=Topology((), ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """An immutable picture of the hardware, joined with the cards by UUID.

    `failed` says of a UUID why it does not work, `closed` why it takes nothing new though it works for those on it.
    """

    snapshot: NodeSnapshot = EMPTY
    failed: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, str] = field(default_factory=dict)
    quarantine: Quarantine = field(default_factory=Quarantine)

    def meet(self, cards: Cards) -> Cards:
        """Cards with all GPUs of the snapshot in it."""
        for gpu in self.snapshot.gpus:
            cards = cards.meet(gpu.uuid, gpu.memory_blocks)
        return cards

    def gpus(self, cards: Cards) -> Mapping[GpuName, Gpu]:
        """Name -> GPU, of those that the driver shows now."""
        return {cards.by_uuid[gpu.uuid].name: gpu for gpu in self.snapshot.gpus if gpu.uuid in cards.by_uuid}

    def indices(self, cards: Cards) -> Mapping[GpuName, int]:
        """Name -> NVML's index, as nvidia-smi counts; also of one that can't be described and that was known by its UUID before."""
        failed = [(failure.uuid, failure.index) for failure in self.snapshot.failures if failure.uuid is not None]
        shown = [(gpu.uuid, gpu.index) for gpu in self.snapshot.gpus]
        return {cards.by_uuid[uuid].name: index for uuid, index in (*failed, *shown) if uuid in cards.by_uuid}

    def unnamed(self, cards: Cards) -> Sequence[GpuFailure]:
        """What the driver lists and can't describe and that is none of the cards, as far as anybody knows."""
        return [failure for failure in self.snapshot.failures if failure.uuid not in cards.by_uuid]

    def granted(self, cards: Cards) -> Mapping[GpuName, GrantedGpu]:
        """What containers are told of each card; one that the driver does not show now has no device node to name."""
        shown = self.gpus(cards)
        return {c.name: GrantedGpu(uuid=c.uuid, minor=shown[c.name].minor if c.name in shown else None) for c in cards.cards}

    def failures(self, cards: Cards) -> Mapping[GpuName, str]:
        """GPU -> why it does not work; a known card that the driver does not show is one of them."""
        shown = self.gpus(cards)
        reasons = {
            c.name: self.failed.get(c.uuid) or (None if c.name in shown else "the driver does not show it") for c in cards.cards
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def closures(self, cards: Cards) -> Mapping[GpuName, str]:
        """GPU -> why it takes nothing new."""
        reasons = {c.name: self.closed.get(c.uuid) or self.quarantine.reason(c.name) for c in cards.cards}
        return {name: reason for name, reason in reasons.items() if reason}

    def view(self, cards: Cards, *, policy: Policy, visible_blocks: Masks) -> NodeView:
        rows = {cards.by_uuid[g.uuid].name: row for row, g in enumerate(self.snapshot.gpus) if g.uuid in cards.by_uuid}
        return NodeView(
            topology=self.snapshot.topology,
            rows=rows,
            indices=self.indices(cards),
            unfit={**self.closures(cards), **self.failures(cards)},
            visible_blocks=visible_blocks,
            policy=policy,
        )

    def offer(self, ledger: Ledger, open_ids: Collection[AllocationId]) -> Offer:
        cards = ledger.cards
        gpus = self.gpus(cards)
        return offer(
            ledger,
            failed=self.failures(cards).keys(),
            closed=self.closures(cards).keys(),
            numa_nodes={name: gpu.numa_node for name, gpu in gpus.items() if gpu.numa_node is not None},
            memory_blocks={name: gpu.memory_blocks for name, gpu in gpus.items()},
            open_ids=open_ids,
        )

    def processes(self, cards: Cards, sample: NodeSample, started: Mapping[int, int]) -> Mapping[GpuName, list[Process]]:
        """GPU -> its processes with their start times, of the GPUs whose process list could be read."""
        return {
            cards.by_uuid[uuid].name: [(p.pid, started[p.pid]) for p in gpu.processes if p.pid in started]
            for uuid, gpu in sample.gpus.items()
            if uuid in cards.by_uuid and gpu.processes is not None
        }

    def with_snapshot(self, snapshot: NodeSnapshot) -> "Inventory":
        return replace(self, snapshot=snapshot)
