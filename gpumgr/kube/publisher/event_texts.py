"""Makes the events for entries of the history and for placements. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from gpumgr.common.units import CORES_PER_GPU, GpuName
from gpumgr.kube.publisher.events import Event, ObjectRef, node_ref
from gpumgr.ledger.history import DEMANDED, NOT_ENFORCED, HistoryEntry
from gpumgr.ledger.ledger import Allocation

PLACED: Final = "GpuPlaced"
REFUSED: Final = "GpuRefused"

#: Mechanisms that enforce nothing (the backends Unlimited and UnlimitedMps).
_UNLIMITED: Final = frozenset({"none", "mps-open"})

#: Code of a GPU's entry -> the event's reason, and whether it is a warning. The reasons of other codes are derived from the code.
_OF_GPUS: Final[Mapping[str, tuple[str, bool]]] = {
    "lost": ("GpuLost", True),
    "unhealthy": ("GpuUnhealthy", True),
    "not_readable": ("GpuNotReadable", True),
    "back": ("GpuBack", False),
    "cordoned": ("GpuCordoned", False),
    "uncordoned": ("GpuUncordoned", False),
    "forgotten": ("GpuForgotten", False),
    "overcommitted": ("GpuOvercommitted", True),
}

#: The name of a GPU for people.
Label = Callable[[GpuName], str]


def placement(about: ObjectRef, allocations: Sequence[Allocation], label: Label) -> Event:
    """The event with the GPUs of all containers of a pod, and with the containers that run without limits."""
    return Event(
        about=about,
        reason=PLACED,
        message="; ".join([*(_placed(a, label) for a in allocations), *_caution(allocations)]),
        warning=False,
        allocations=tuple(a.id for a in allocations),
    )


def refusal(about: ObjectRef, entry: HistoryEntry) -> Event:
    prefix = f"container {entry.container}: " if entry.container else ""
    return Event(about=about, reason=REFUSED, message=prefix + entry.why, warning=True, allocations=_ids(entry))


def pod_event(about: ObjectRef, entry: HistoryEntry) -> Event:
    """The event of an entry of the kind "event": a warning, except about what the pod itself demanded (DEMANDED)."""
    warning = entry.code not in DEMANDED
    return Event(about=about, reason=entry.code or "GpuNews", message=entry.why, warning=warning, allocations=_ids(entry))


def gpu_event(node: str, entry: HistoryEntry, label: Label) -> Event:
    code = entry.code or "news"
    reason, warning = _OF_GPUS.get(code, ("Gpu" + "".join(word.capitalize() for word in code.split("_")), False))
    gpus = ", ".join(map(label, entry.gpus))
    message = ": ".join(filter(None, (gpus, entry.why or code)))
    return Event(about=node_ref(node), reason=reason, message=message, warning=warning, allocations=_ids(entry))


def config_event(node: str, entry: HistoryEntry) -> Event:
    """The event about the settings file: "GpumgrConfigReloaded", or as a warning "GpumgrConfigRejected"."""
    reason = f"GpumgrConfig{(entry.code or 'news').capitalize()}"
    return Event(about=node_ref(node), reason=reason, message=entry.why, warning=entry.code == "rejected")


def _ids(entry: HistoryEntry) -> tuple[str, ...]:
    return (entry.id,) if entry.id else ()


def _placed(a: Allocation, label: Label) -> str:
    name = f"{a.container}: " if a.container else ""
    return name + ", ".join(_parts(a, label)) + (f" ({a.why})" if a.why else "")


def _caution(allocations: Sequence[Allocation]) -> Iterator[str]:
    free = [a for a in allocations if not a.whole and a.mechanisms and _UNLIMITED.issuperset(a.mechanisms)]
    if free:
        names = ", ".join(a.container or "?" for a in free)
        which = f"container {names} within its share" if len(free) == 1 else f"containers {names} within their shares"
        backends = ", ".join(dict.fromkeys(name for a in free for name in a.mechanisms))
        yield f"{NOT_ENFORCED}: nothing on this node keeps {which} (enforcement backend {backends})"
        yield "`gpumgr doctor` on the node says which backends could"


def _parts(a: Allocation, label: Label) -> Iterator[str]:
    yield from map(label, a.gpus)
    if a.whole:
        number = a.cores // CORES_PER_GPU
        yield "whole" if number == 1 else f"{number} whole GPUs"
    elif a.cores:
        yield f"{a.cores} core{'s' if a.cores > 1 else ''}"
    if memory := a.memory_mebibytes:
        yield f"{memory} MiB"
