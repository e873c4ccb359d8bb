"""A picture as metric families: pure functions. What the driver does not tell has no series; what has left the ledger neither.

The label `gpu` is the GPU's UUID everywhere. Ratios are 0..1, memory is in bytes (Prometheus: base units only).
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpumgr.agent.picture import Picture
from gpumgr.allocator.ids import ALL_CORES
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.topology.devices import GpuSample, NodeSample
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU, GpuName

#: Of every series about one container on one GPU.
CONTAINER_LABELS: Final = ("namespace", "pod", "container", "gpu")

_SAMPLED: Final[tuple[tuple[str, str, Callable[[GpuSample], float | None]], ...]] = (
    (
        "memory_used_bytes",
        "Memory in use on the GPU (with an old driver, what it reserves for itself included).",
        lambda sample: sample.memory_used_bytes,
    ),
    ("memory_reserved_bytes", "Memory that the driver reserves for itself.", lambda sample: sample.memory_reserved_bytes),
    (
        "utilization_ratio",
        "Share of the driver's sample period in which a kernel ran on the GPU.",
        lambda sample: sample.utilization_ratio,
    ),
    (
        "memory_copy_ratio",
        "Share of the driver's sample period in which memory was read or written.",
        lambda sample: sample.memory_copy_ratio,
    ),
    ("temperature_celsius", "Temperature of the GPU's die.", lambda sample: sample.temperature_celsius),
    ("power_watts", "Power that the board draws.", lambda sample: sample.power_watts),
)


def picture_families(picture: Picture, *, node: str) -> Iterator[Metric]:
    """All families of a picture; `node` is the Kubernetes node's name. Families without a sample are in it too."""
    yield from _hardware(picture, node)
    # A value from before the driver went away would look like news.
    yield from _sampled(picture.sample if picture.sample and picture.nvml_up else NodeSample())
    yield from _health(picture)
    yield from _links(picture)
    yield from _allocated(picture.view.ledger)
    yield from _containers(picture.view.ledger)


def _hardware(picture: Picture, node: str) -> Iterator[Metric]:
    info = gauge(
        "gpu_info", "What the GPU is; always 1.", "node", "gpu", "index", "minor", "model", "pci_bus_id", "numa", "driver"
    )
    total = gauge("gpu_memory_total_bytes", "Memory of the GPU.", "gpu")
    cards, snapshot = picture.view.ledger.cards, picture.view.inventory.snapshot
    shown = picture.view.inventory.gpus(cards)
    for card in cards.cards:
        gpu = shown.get(card.name)
        if gpu is None:
            info.add_metric([node, card.uuid, "", "", "", "", "", ""], 1)
            continue
        facts = (gpu.index, gpu.minor, gpu.model, gpu.bus_id, gpu.numa_node, snapshot.driver_version)
        info.add_metric([node, card.uuid, *("" if fact is None else str(fact) for fact in facts)], 1)
        total.add_metric([card.uuid], gpu.memory_bytes)
    yield info
    yield total


def _sampled(sample: NodeSample) -> Iterator[Metric]:
    for name, about, read in _SAMPLED:
        family = gauge(f"gpu_{name}", about, "gpu")
        for uuid, gpu in sample.gpus.items():
            if (value := read(gpu)) is not None:
                family.add_metric([uuid], value)
        yield family


def _health(picture: Picture) -> Iterator[Metric]:
    healthy = gauge("gpu_healthy", "1 if new containers may be placed on the GPU.", "gpu")
    reason = gauge(
        "gpu_unhealthy_reason", "1 for the reason why the GPU takes nothing new; no series otherwise.", "gpu", "reason"
    )
    unfit = picture.unfit()
    for card in picture.view.ledger.cards.cards:
        why = unfit.get(card.name)
        healthy.add_metric([card.uuid], why is None)
        if why is not None:
            reason.add_metric([card.uuid, why], 1)
    yield healthy
    yield reason


def _links(picture: Picture) -> Iterator[Metric]:
    family = gauge(
        "nvlink_active_links", "NVLinks between two GPUs (through NVSwitch: that both have into the fabric).", "gpu", "peer"
    )
    snapshot = picture.view.inventory.snapshot
    for gpu, row in zip(snapshot.gpus, snapshot.topology.nvlinks, strict=True):
        for peer, links in zip(snapshot.gpus, row, strict=True):
            if links and peer is not gpu:
                family.add_metric([gpu.uuid, peer.uuid], links)
    yield family


def _allocated(ledger: Ledger) -> Iterator[Metric]:
    cores = gauge("gpu_core_allocated_ratio", "Share of the GPU's cores that containers hold.", "gpu")
    memory = gauge(
        "gpu_memory_allocated_bytes", "Memory that containers hold; all of it on a GPU that one container has whole.", "gpu"
    )
    sharers = gauge("gpu_shared_containers", "Containers that share the GPU (0: nobody, or one container has it whole).", "gpu")
    held_cores, held_blocks = ledger.held("core"), ledger.held("memory")
    count = _sharers(ledger)
    for card in ledger.cards.cards:
        blocks = card.memory_blocks if card.name in ledger.exclusive else held_blocks.get(card.name, 0).bit_count()
        cores.add_metric([card.uuid], held_cores.get(card.name, 0).bit_count() / CORES_PER_GPU)
        memory.add_metric([card.uuid], blocks * BLOCK_BYTES)
        sharers.add_metric([card.uuid], count.get(card.name, 0))
    yield cores
    yield memory
    yield sharers


def current_shares(ledger: Ledger) -> list[Allocation]:
    """Containers with a part of a GPU; an init container counts until its pod's next container has taken its place."""
    started = {allocation.pod for allocation in ledger.allocations.values() if not allocation.init}
    return [a for a in ledger.allocations.values() if not a.whole and not (a.init and a.pod in started)]


def _sharers(ledger: Ledger) -> dict[GpuName, int]:
    """GPU -> containers with a part of it."""
    count: dict[GpuName, int] = {}
    for allocation in current_shares(ledger):
        for gpu in _places(allocation):
            count[gpu] = count.get(gpu, 0) + 1
    return count


def _containers(ledger: Ledger) -> Iterator[Metric]:
    cores = gauge("container_core_allocated_ratio", "Share of the GPU's cores that the container holds.", *CONTAINER_LABELS)
    memory = gauge(
        "container_memory_allocated_bytes",
        "Memory that the container holds; all of the GPU's if it has the GPU whole.",
        *CONTAINER_LABELS,
    )
    # Sums: two lives of one name (StatefulSets), and holders without a name yet, would make one series twice.
    held: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for allocation in ledger.allocations.values():
        namespace, pod = allocation.pod or ("", "")
        for name in _places(allocation):
            card = ledger.cards.by_name[name]
            key = (namespace, pod, allocation.container or "", card.uuid)
            core_mask = allocation.cores.get(name, 0)
            blocks = card.memory_blocks if core_mask == ALL_CORES else allocation.blocks.get(name, 0).bit_count()
            before = held.get(key, (0, 0))
            held[key] = (before[0] + core_mask.bit_count(), before[1] + blocks)
    for key, (core_count, block_count) in held.items():
        cores.add_metric(key, core_count / CORES_PER_GPU)
        memory.add_metric(key, block_count * BLOCK_BYTES)
    yield cores
    yield memory


def _places(allocation: Allocation) -> dict[GpuName, None]:
    return dict.fromkeys((*allocation.cores, *allocation.blocks))


def gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    """A family without series yet; `name` is without the prefix that all of ours have."""
    return GaugeMetricFamily(f"gpumgr_{name}", about, labels=labels)
