"""Who holds what: an immutable value. Every change makes a new ledger; the agent persists it before anybody sees it.

Laws (checked by `Ledger.check`, and by a Hypothesis state machine in the tests):

1. Two pods never hold the same device id. Within one pod only containers that follow an init container may hold its ids again.
2. A GPU whose 100 cores belong to a whole-GPU allocation has no holder of another pod, neither of cores nor of memory blocks.
3. Ids lie on known cards, within their capacity.
4. An allocation was granted at least one GPU, and only GPUs where its pod holds something.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import ALL_CORES, NO_IDS, Cards, Masks, common, count, minus, union
from gpumgr.allocator.pods import PodKey
from gpumgr.units import CORES_PER_GPU, GpuName, Kind

#: Random name of an allocation; host folders carry it, so it never repeats and tells nothing about the pod.
AllocationId = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one container holds.

    `pod`, `uid` and `container` are None until known. `gpus` are the GPUs that the container was given, which may be fewer than
    those its ids lie on (a container that takes over an init container's ids gets one, or as many as it asked for).
    `granted_at` is in unix seconds. `anonymous` marks a record of gpu-manager: its pod holds ids that name no GPU. `mechanisms` are
    the names of what keeps a share within its limits, as they were when it was granted: what its container was answered never changes.
    `exemption` is the namespace or namespace/serviceaccount for whose sake they are others than the node's; `cdi`: its container was
    answered with the name of a CDI device.
    """

    id: AllocationId
    pod: PodKey | None = None
    uid: str | None = None
    container: str | None = None
    init: bool = False
    cores: Masks = field(default_factory=dict)
    blocks: Masks = field(default_factory=dict)
    gpus: tuple[GpuName, ...] = ()
    granted_at: float = 0.0
    why: str = ""
    anonymous: bool = False
    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False

    def held(self, kind: Kind) -> Masks:
        return self.cores if kind == "core" else self.blocks

    def with_held(self, kind: Kind, masks: Masks) -> "Allocation":
        return replace(self, cores=masks) if kind == "core" else replace(self, blocks=masks)

    @property
    def core_count(self) -> int:
        return count(self.cores)

    @property
    def block_count(self) -> int:
        return count(self.blocks)

    @property
    def whole(self) -> bool:
        return self.core_count >= CORES_PER_GPU

    def same_pod(self, other: "Allocation") -> bool:
        if self.uid and other.uid:
            return self.uid == other.uid
        return self.pod is not None and self.pod == other.pod

    def describe(self) -> str:
        """How a refusal calls the holder."""
        name = "/".join(self.pod) if self.pod else (f"pod uid {self.uid}" if self.uid else f"allocation {self.id}")
        return f"{name} ({self.container})" if self.container else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Difference between two ledgers, as the checkpoint stores it, and what there is to tell of it."""

    put: tuple[Allocation, ...] = ()
    drop: tuple[AllocationId, ...] = ()
    cards: Cards | None = None
    entries: tuple[Entry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.put or self.drop or self.cards is not None or self.entries)


@dataclass(frozen=True)
class Ledger:
    """All allocations of the node, by id, and the cards that their ids lie on."""

    cards: Cards = field(default_factory=Cards)
    allocations: Mapping[AllocationId, Allocation] = field(default_factory=dict)

    # -- questions ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _held(self) -> Mapping[Kind, Masks]:
        every = self.allocations.values()
        return {"core": union(*(a.cores for a in every)), "memory": union(*(a.blocks for a in every))}

    def held(self, kind: Kind) -> Masks:
        """Ids of one kind that anybody holds."""
        return self._held[kind]

    def held_by(self, kind: Kind, wanted: Callable[[Allocation], bool]) -> Masks:
        return union(*(a.held(kind) for a in self.allocations.values() if wanted(a)))

    def on(self, gpu: GpuName) -> list[Allocation]:
        """Allocations with ids on this GPU, oldest first."""
        found = [a for a in self.allocations.values() if gpu in a.cores or gpu in a.blocks]
        return sorted(found, key=lambda a: (a.granted_at, a.id))

    def of(self, pod: PodKey | None, uid: str | None = None) -> list[Allocation]:
        """Allocations of one pod; with both UIDs known, the UID decides (names recur)."""
        probe = Allocation(id="", pod=pod, uid=uid)
        return [a for a in self.allocations.values() if a.same_pod(probe)]

    def holders(self, kind: Kind, masks: Masks) -> list[Allocation]:
        """Allocations that hold any of these ids."""
        return [a for a in self.allocations.values() if common(a.held(kind), masks)]

    def reusable(self, kind: Kind, pod: PodKey | None, uid: str | None = None) -> Masks:
        """Ids of the pod's init containers that no sidecar or app container has taken over (kubelet: devicesToReuse)."""
        mine = self.of(pod, uid)
        return minus(union(*(a.held(kind) for a in mine if a.init)), union(*(a.held(kind) for a in mine if not a.init)))

    @cached_property
    def exclusive(self) -> Mapping[GpuName, Allocation]:
        """GPU -> the whole-GPU allocation that owns it."""
        return {gpu: a for a in self.allocations.values() if a.whole for gpu, mask in a.cores.items() if mask == ALL_CORES}

    # -- changes -----------------------------------------------------------------------------------------------------------

    def occupy(self, allocation: Allocation) -> "Ledger":
        """With this allocation added, or put in the place of the one with its id."""
        return Ledger(self.cards, {**self.allocations, allocation.id: allocation})

    def free(self, ids: Iterable[AllocationId]) -> "Ledger":
        gone = set(ids)
        return Ledger(self.cards, {k: a for k, a in self.allocations.items() if k not in gone}) if gone else self

    def with_cards(self, cards: Cards) -> "Ledger":
        return self if cards == self.cards else Ledger(cards, self.allocations)

    def since(self, before: "Ledger") -> Change:
        """What must be written so that a store that holds `before` holds this ledger."""
        return Change(
            put=tuple(a for k, a in self.allocations.items() if before.allocations.get(k) != a),
            drop=tuple(k for k in before.allocations if k not in self.allocations),
            cards=None if self.cards == before.cards else self.cards,
        )

    # -- laws --------------------------------------------------------------------------------------------------------------

    def broken_laws(self) -> list[str]:
        """Sentences, one for each broken law; empty for a sound ledger."""
        every = list(self.allocations.values())
        broken: list[str] = []
        for kind in ("core", "memory"):
            broken += _outside(every, self.cards, kind) + _shared_ids(every, kind)
        for gpu, owner in self.exclusive.items():
            broken += [
                f"{a.describe()} is on GPU {gpu}, which {owner.describe()} has whole"
                for a in self.on(gpu)
                if a is not owner and not a.same_pod(owner)
            ]
        broken += [f"{a.describe()} was granted no GPU" for a in every if not a.gpus]
        return broken

    def check(self) -> "Ledger":
        """Itself, if sound. Raises ValueError that names the broken laws: a bug, never a user's mistake."""
        if broken := self.broken_laws():
            raise ValueError("the ledger is broken: " + "; ".join(broken))
        return self


def _outside(allocations: Iterable[Allocation], cards: Cards, kind: Kind) -> list[str]:
    def room(gpu: GpuName) -> int:
        card = cards.by_name.get(gpu)
        return card.all_ids(kind) if card else 0

    return [
        f"{a.describe()} holds {kind} ids that GPU {gpu} does not have"
        for a in allocations
        for gpu, mask in a.held(kind).items()
        if mask & ~room(gpu)
    ]


def _shared_ids(allocations: list[Allocation], kind: Kind) -> list[str]:
    broken: list[str] = []
    seen: Masks = NO_IDS
    for position, a in enumerate(allocations):
        if common(seen, a.held(kind)):
            broken += [
                f"{a.describe()} and {b.describe()} hold the same {kind} ids"
                for b in allocations[:position]
                if common(a.held(kind), b.held(kind)) and not (a.same_pod(b) and (a.init or b.init))
            ]
        seen = union(seen, a.held(kind))
    return broken
