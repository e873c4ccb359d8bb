"""gpu-manager's four gauges, with exactly its names, helps, labels and units: percent of a card, cards, MiB used, MiB.

Source: gpu-manager's display service. Usage has one series for each card and one called `total`; requests are totals. It tells of all
containers of pods that ask for GPUs, with 0 for those that ask for none, but not of init containers. Without memory blocks in the
request, the memory of the granted cards stands there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpumgr.agent.picture import Picture
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.metrics.gpus import ratio
from gpumgr.metrics.pace import paced
from gpumgr.metrics.text import Block, Family, LabelTexts, block
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU

#: Of every series, before the one that tells the card.
HOLDER_LABELS: Final = ("pod_name", "namespace", "node", "container_name")

#: A pod and its container.
Holder = tuple[PodKey, str]


def _family(name: str, about: str, card: str) -> Family:
    return Family(name=name, about=about, labels=(*HOLDER_LABELS, card))


_UTILIZATION: Final = _family("container_gpu_utilization", "gpu utilization", "gpu")
_MEMORY: Final = _family("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory")
_CARDS_ASKED: Final = _family("container_request_gpu_utilization", "request of gpu utilization", "req_of_gpu")
_MEMORY_ASKED: Final = _family("container_request_gpu_memory", "request of gpu memory in MiB", "req_of_gpu_memory")


def gpu_manager_blocks(picture: Picture, pods: Sequence[PodView], *, node: str, texts: LabelTexts) -> Iterator[Block]:
    """`pods` are those of the node, as far as they are known; the ledger knows the others that hold something. `texts` are those of
    HOLDER_LABELS."""
    yield from _used(picture, {pod.key for pod in pods if pod.ended}, node, texts)
    cards: dict[str, float] = {}
    mebibytes: dict[str, float] = {}
    for (pod, container), (cores, memory_mebibytes) in paced(_asked(picture, pods).items()):
        holder = texts.of(pod[1], pod[0], node, container)
        cards[f'{holder},req_of_gpu="total"'] = cores / CORES_PER_GPU
        mebibytes[f'{holder},req_of_gpu_memory="total"'] = memory_mebibytes
    yield block(_CARDS_ASKED, cards)
    yield block(_MEMORY_ASKED, mebibytes)


def _holder(allocation: Allocation) -> Holder | None:
    """None: gpu-manager would not tell of it, or nobody knows yet whose it is."""
    if allocation.init or allocation.pod is None or allocation.container is None:
        return None
    return allocation.pod, allocation.container


def _used(picture: Picture, ended: set[PodKey], node: str, texts: LabelTexts) -> Iterator[Block]:
    allocations = picture.view.ledger.allocations
    index_of = {gpu.uuid: gpu.index for gpu in picture.view.inventory.snapshot.gpus}
    percents: dict[str, float] = {}
    mebibytes: dict[str, float] = {}
    # Numbers from before the driver went away would look like news.
    for use in paced(picture.use.containers.values() if picture.use and picture.nvml_up else ()):
        allocation = allocations.get(use.allocation)
        holder = _holder(allocation) if allocation else None
        if holder is None or use.uuid not in index_of or holder[0] in ended:
            continue
        labels = texts.of(holder[0][1], holder[0][0], node, holder[1])
        share = ratio(use.utilization_ratio)
        for card in (f"gpu{index_of[use.uuid]}", "total"):
            if share is not None:
                _add(percents, f'{labels},gpu="{card}"', round(100 * share, 6))
            if use.memory_bytes is not None:
                _add(mebibytes, f'{labels},gpu_memory="{card}"', use.memory_bytes >> 20)
    yield block(_UTILIZATION, percents)
    yield block(_MEMORY, mebibytes)


def _add(series: dict[str, float], labels: str, value: float) -> None:
    series[labels] = series.get(labels, 0) + value


def _asked(picture: Picture, pods: Sequence[PodView]) -> Mapping[Holder, tuple[int, int]]:
    """Cores and MiB."""
    granted = _granted(picture)
    known = {pod.key for pod in pods}
    asked = {holder: what for holder, what in granted.items() if holder[0] not in known}
    for pod in paced(pods):
        if pod.ended or not pod.wants_gpu:
            continue
        for spec in pod.containers:
            if spec.kind != "init":
                holder = (pod.key, spec.name)
                of_cards = granted[holder][1] if spec.cores and holder in granted else 0
                asked[holder] = (spec.cores, _mebibytes(spec.memory_blocks) or of_cards)
    return asked


def _granted(picture: Picture) -> Mapping[Holder, tuple[int, int]]:
    """Cores and MiB, of whole cards their size; of two lives of one name, the later one's."""
    ledger = picture.view.ledger
    size_of = {card.name: _mebibytes(card.memory_blocks) for card in ledger.cards.cards}
    size_of |= {name: gpu.memory_bytes >> 20 for name, gpu in picture.view.inventory.gpus(ledger.cards).items()}
    granted: dict[Holder, tuple[int, int]] = {}
    for allocation in paced(ledger.allocations.values()):
        if (holder := _holder(allocation)) is not None:
            cores = allocation.core_count
            whole = cores >= CORES_PER_GPU
            mebibytes = sum(size_of[gpu] for gpu in allocation.gpus) if whole else _mebibytes(allocation.block_count)
            granted[holder] = (cores, mebibytes)
    return granted


def _mebibytes(blocks: int) -> int:
    return blocks * BLOCK_BYTES >> 20
