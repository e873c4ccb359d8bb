"""What the history says, as notices for people. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from gpumgr.allocator.annotations import memory_mebibytes
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import Cards
from gpumgr.allocator.ledger import Allocation
from gpumgr.kubeapi.writer.notices import Notice, Subject, node_subject
from gpumgr.units import CORES_PER_GPU, GpuName

PLACED: Final = "GpuPlaced"
REFUSED: Final = "GpuRefused"
#: A container runs without limits: said in the event of its placement, and in the history when it starts.
NOT_ENFORCED: Final = "GpuLimitNotEnforced"

#: Mechanisms that keep nothing (gpumgr.enforcement: nothing, mps.exempt).
_UNLIMITED: Final = frozenset({"none", "mps-open"})

#: What became of a GPU -> the event's reason, and whether it is a warning. Others are told by their own names.
_OF_GPUS: Final[Mapping[str, tuple[str, bool]]] = {
    "lost": ("GpuLost", True),
    "unhealthy": ("GpuUnhealthy", True),
    "not_readable": ("GpuNotReadable", True),
    "back": ("GpuBack", False),
    "cordoned": ("GpuCordoned", False),
    "uncordoned": ("GpuUncordoned", False),
}

#: How people call a GPU.
Label = Callable[[GpuName], str]


def placement(about: Subject, allocations: Sequence[Allocation], cards: Cards, label: Label) -> Notice:
    """All of a pod's containers in one notice, and which of them nothing keeps within their shares."""
    return Notice(
        about=about,
        reason=PLACED,
        message="; ".join([*(_placed(a, cards, label) for a in allocations), *_caution(allocations)]),
        warning=False,
        allocations=tuple(a.id for a in allocations),
    )


def refusal(about: Subject, entry: Entry) -> Notice:
    place = f"container {entry.container}: " if entry.container else ""
    return Notice(about=about, reason=REFUSED, message=place + entry.why, warning=True, allocations=_ids(entry))


def pod_news(about: Subject, entry: Entry) -> Notice:
    """Of what a pod is told besides, nothing is good news."""
    return Notice(about=about, reason=entry.code or "GpuNews", message=entry.why, warning=True, allocations=_ids(entry))


def gpu_news(node: str, entry: Entry, label: Label) -> Notice:
    code = entry.code or "news"
    reason, warning = _OF_GPUS.get(code, ("Gpu" + "".join(word.capitalize() for word in code.split("_")), False))
    gpus = ", ".join(map(label, entry.gpus))
    message = ": ".join(filter(None, (gpus, entry.why or code)))
    return Notice(about=node_subject(node), reason=reason, message=message, warning=warning, allocations=_ids(entry))


def config_news(node: str, entry: Entry) -> Notice:
    """Of the settings file: "GpumgrConfigReloaded", or as a warning "GpumgrConfigRejected"."""
    reason = f"GpumgrConfig{(entry.code or 'news').capitalize()}"
    return Notice(about=node_subject(node), reason=reason, message=entry.why, warning=entry.code == "rejected", allocations=())


def _ids(entry: Entry) -> tuple[str, ...]:
    return (entry.id,) if entry.id else ()


def _placed(a: Allocation, cards: Cards, label: Label) -> str:
    name = f"{a.container}: " if a.container else ""
    return name + ", ".join(_parts(a, cards, label)) + (f" ({a.why})" if a.why else "")


def _caution(allocations: Sequence[Allocation]) -> Iterator[str]:
    free = [a for a in allocations if not a.whole and a.mechanisms and _UNLIMITED.issuperset(a.mechanisms)]
    if free:
        names = ", ".join(a.container or "?" for a in free)
        whose = f"container {names} within its share" if len(free) == 1 else f"containers {names} within their shares"
        backends = ", ".join(dict.fromkeys(name for a in free for name in a.mechanisms))
        yield f"{NOT_ENFORCED}: nothing on this node keeps {whose} (enforcement backend {backends})"
        yield "`gpumgr doctor` on the node says what could"


def _parts(a: Allocation, cards: Cards, label: Label) -> Iterator[str]:
    yield from map(label, a.gpus)
    if a.whole:
        number = a.core_count // CORES_PER_GPU
        yield "whole" if number == 1 else f"{number} whole GPUs"
    else:
        yield f"{a.core_count} core{'s' if a.core_count > 1 else ''}"
    if memory := memory_mebibytes(a, cards):
        yield f"{memory} MiB"
