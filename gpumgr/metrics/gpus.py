"""A picture's GPUs as text: pure functions. What the driver does not tell has no series.

The label `gpu` is the GPU's UUID everywhere. Ratios are 0..1, memory is in bytes (Prometheus: base units only).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpumgr.agent.picture import Picture
from gpumgr.allocator.ids import ALL_CORES, Card, Cards
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.metrics.text import Block, Family, block, gauge, label_text
from gpumgr.topology.devices import GpuSample, NodeSample
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.usage.picture import GpuUse

_INFO: Final = gauge(
    "gpu_info", "What the GPU is; always 1.", "node", "gpu", "index", "minor", "model", "pci_bus_id", "numa", "driver"
)
_TOTAL: Final = gauge("gpu_memory_total_bytes", "Memory of the GPU.", "gpu")
_HEALTHY: Final = gauge("gpu_healthy", "1 if new containers may be placed on the GPU.", "gpu")
_REASON: Final = gauge(
    "gpu_unhealthy_reason", "1 for the reason why the GPU takes nothing new; no series otherwise.", "gpu", "reason"
)
_NOT_READABLE: Final = gauge(
    "gpus_not_readable", "GPUs that the driver lists and can't describe, and that are none of those known by their UUID."
)
_CORDONED: Final = gauge("gpu_cordoned", "1 if an operator took the GPU out of service.", "gpu")
_LINKS: Final = gauge(
    "nvlink_active_links", "NVLinks between two GPUs (through NVSwitch: that both have into the fabric).", "gpu", "peer"
)
_CORES: Final = gauge("gpu_core_allocated_ratio", "Share of the GPU's cores that containers hold.", "gpu")
_MEMORY: Final = gauge(
    "gpu_memory_allocated_bytes", "Memory that containers hold; all of it on a GPU that one container has whole.", "gpu"
)
_SHARERS: Final = gauge(
    "gpu_shared_containers", "Containers that share the GPU (0: nobody, or one container has it whole).", "gpu"
)


def ratio(value: float | None) -> float | None:
    """Within 0..1, whatever the driver says."""
    return None if value is None else min(1.0, max(0.0, value))


_SAMPLED: Final[tuple[tuple[Family, Callable[[GpuSample], float | None]], ...]] = (
    (
        gauge(
            "gpu_memory_used_bytes",
            "Memory in use on the GPU (with an old driver, what it reserves for itself included).",
            "gpu",
        ),
        lambda sample: sample.memory_used_bytes,
    ),
    (
        gauge("gpu_memory_reserved_bytes", "Memory that the driver reserves for itself.", "gpu"),
        lambda sample: sample.memory_reserved_bytes,
    ),
    (
        gauge("gpu_utilization_ratio", "Share of the driver's sample period in which a kernel ran on the GPU.", "gpu"),
        lambda sample: ratio(sample.utilization_ratio),
    ),
    (
        gauge("gpu_memory_copy_ratio", "Share of the driver's sample period in which memory was read or written.", "gpu"),
        lambda sample: ratio(sample.memory_copy_ratio),
    ),
    (gauge("gpu_temperature_celsius", "Temperature of the GPU's die.", "gpu"), lambda sample: sample.temperature_celsius),
    (gauge("gpu_power_watts", "Power that the board draws.", "gpu"), lambda sample: sample.power_watts),
)
_UNACCOUNTED: Final[tuple[tuple[Family, Callable[[GpuUse], float]], ...]] = (
    (
        gauge("unaccounted_memory_bytes", "Memory in use on the GPU by processes that no allocation lets be there.", "gpu"),
        lambda use: use.stranger_memory_bytes,
    ),
    (
        gauge("unaccounted_processes", "Processes on the GPU that no allocation lets be there.", "gpu"),
        lambda use: use.stranger_processes,
    ),
)

FAMILIES: Final = (
    *(_INFO, _TOTAL, _HEALTHY, _REASON, _NOT_READABLE, _CORDONED, _LINKS, _CORES, _MEMORY, _SHARERS),
    *(family for family, _ in _SAMPLED),
    *(family for family, _ in _UNACCOUNTED),
)


def gpu_blocks(picture: Picture, *, node: str) -> Iterator[Block]:
    """`node` is the Kubernetes node's name. Families without a series are in it too."""
    yield from _hardware(picture, node)
    # A value from before the driver went away would look like news.
    sample = picture.sample if picture.sample and picture.nvml_up else NodeSample()
    for family, read in _SAMPLED:
        yield block(family, {_gpu(uuid): value for uuid, gpu in sample.gpus.items() if (value := read(gpu)) is not None})
    yield from _fitness(picture)
    yield _links(picture)
    yield from _allocated(picture.view.ledger)
    uses = picture.use.gpus.values() if picture.use and picture.nvml_up else ()
    for unaccounted, count in _UNACCOUNTED:
        yield block(unaccounted, {_gpu(use.uuid): count(use) for use in uses})


def _gpu(uuid: str) -> str:
    return label_text(("gpu",), (uuid,))


def _hardware(picture: Picture, node: str) -> Iterator[Block]:
    cards, snapshot = picture.view.ledger.cards, picture.view.inventory.snapshot
    shown = picture.view.inventory.gpus(cards)
    infos: dict[str, float] = {}
    for card in cards.cards:
        gpu = shown.get(card.name)
        facts = (gpu.index, gpu.minor, gpu.model, gpu.bus_id, gpu.numa_node, snapshot.driver_version) if gpu else (None,) * 6
        infos[label_text(_INFO.labels, (node, card.uuid, *("" if fact is None else str(fact) for fact in facts)))] = 1
    yield block(_INFO, infos)
    yield block(_TOTAL, {_gpu(gpu.uuid): gpu.memory_bytes for gpu in shown.values()})


def _fitness(picture: Picture) -> Iterator[Block]:
    cards, unfit = picture.view.ledger.cards.cards, picture.unfit()
    yield block(_HEALTHY, {_gpu(card.uuid): card.name not in unfit for card in cards})
    yield block(_REASON, {label_text(_REASON.labels, (c.uuid, unfit[c.name])): 1 for c in cards if c.name in unfit})
    if picture.nvml_up:
        yield block(_NOT_READABLE, {"": len(picture.view.inventory.unnamed(picture.view.ledger.cards))})
    yield block(_CORDONED, {_gpu(card.uuid): card.uuid in picture.cordons for card in cards})


def _links(picture: Picture) -> Block:
    snapshot = picture.view.inventory.snapshot
    return block(
        _LINKS,
        {
            label_text(_LINKS.labels, (gpu.uuid, peer.uuid)): links
            for gpu, row in zip(snapshot.gpus, snapshot.topology.nvlinks, strict=True)
            for peer, links in zip(snapshot.gpus, row, strict=True)
            if links and peer is not gpu
        },
    )


def _allocated(ledger: Ledger) -> Iterator[Block]:
    cards, held_cores = ledger.cards.cards, ledger.held("core")
    blocks, sharers = held_blocks(ledger), _sharers(ledger)
    yield block(_CORES, {_gpu(card.uuid): held_cores.get(card.name, 0).bit_count() / CORES_PER_GPU for card in cards})
    yield block(_MEMORY, {_gpu(card.uuid): blocks[card.name] * BLOCK_BYTES for card in cards})
    yield block(_SHARERS, {_gpu(card.uuid): sharers.get(card.name, 0) for card in cards})


def held_blocks(ledger: Ledger) -> dict[GpuName, int]:
    """Memory blocks that containers hold on each card; all of one that a container has whole."""
    held = ledger.held("memory")
    return {
        card.name: card.memory_blocks if card.name in ledger.exclusive else held.get(card.name, 0).bit_count()
        for card in ledger.cards.cards
    }


def current_shares(ledger: Ledger) -> list[Allocation]:
    """Containers with a part of a GPU; an init container counts until its pod's next container has taken its place."""
    started = {allocation.pod for allocation in ledger.allocations.values() if not allocation.init}
    return [a for a in ledger.allocations.values() if not a.whole and not (a.init and a.pod in started)]


def _sharers(ledger: Ledger) -> dict[GpuName, int]:
    """GPU -> containers with a part of it."""
    count: dict[GpuName, int] = {}
    for allocation in current_shares(ledger):
        for gpu in places(allocation):
            count[gpu] = count.get(gpu, 0) + 1
    return count


def places(allocation: Allocation) -> Iterable[GpuName]:
    """GPUs on which it holds something."""
    return dict.fromkeys((*allocation.cores, *allocation.blocks))


def holdings(allocation: Allocation, cards: Cards) -> Iterator[tuple[Card, int, int]]:
    """The cards on which it holds something, with its cores and its memory blocks there; all blocks of one that it has whole."""
    for name in places(allocation):
        card, cores = cards.by_name[name], allocation.cores.get(name, 0)
        yield card, cores.bit_count(), card.memory_blocks if cores == ALL_CORES else allocation.blocks.get(name, 0).bit_count()
