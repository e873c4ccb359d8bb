"""Groups nodes that are equal for a request, so that the request is computed once for each group.

A share depends on one GPU, so it is computed for rooms: equal GPUs with equal use. Other requests are computed for profiles: nodes that
differ only by name. For requests of whole GPUs, a profile counts each used GPU as full. Each node has a number, its slot. A set of nodes is
an integer: bit n is the node with slot n.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from operator import attrgetter, or_
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit
from gpumgr.cluster.core.node import CountedGpu, GpuState, Naming, NodeState, Used
from gpumgr.cluster.core.request import NOTHING
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts
from gpumgr.placement.devices import Topology

#: Replaces every UUID in a profile. No request names it, because requests strip blanks from UUIDs.
_SOME_UUID: Final = " "
#: The results that a profile keeps, about 600 bytes each; a new one replaces the oldest. Profiles in which every used GPU is full
#: (`Profile.idle`) are few and keep more.
_KEPT_CHOICES: Final = 16
_KEPT_BY_IDLE: Final = 64
#: For at most so many nodes, `rooms_of` collects the rooms node by node.
_FEW: Final = 200
#: If the number of slots exceeds twice the number of nodes by more than this, the index renumbers the nodes. Before it has done so, names
#: without a node get no new slots.
_UNUSED_SLOTS: Final = 1024

_ONE: Final = ord("1")
_FROM_DIGITS: Final = bytes.maketrans(b"01", b"\0\1")
#: In a set with at most so many nodes, the nodes are found bit by bit. More nodes are found faster from the integer's binary digits.
_ONE_BY_ONE: Final = 64
_T = TypeVar("_T")

#: Compares nodes for one request: the lowest is the best; names decide between equal ranks.
Rank = tuple[int, ...]


class FreeCores(NamedTuple):
    """Sums over a node's offered GPUs. `usable`: free cores for which the same GPU has enough free memory. `tight`: how well a pod fills
    the GPUs that it shares, in cores; more is better (see `tight_cores`)."""

    free: int
    usable: int
    tight: int = 0


class Ranked(NamedTuple):
    """The rank of a node with room. `taken`: what the pod takes of the node's free cores. A policy that counts the cores that the pod
    strands (see `Ranking`) compares their number first, and then `rank`. For other policies `taken` is None."""

    rank: Rank
    taken: FreeCores | None = None


class Profile:
    """Nodes that are equal for every request that names none of their GPUs. `state`: the state of these nodes, without a name. `idle`: the
    profile in which each used GPU counts as full; it has these nodes and perhaps more, and may be this profile."""

    __slots__ = ("choices", "cores", "idle", "idle_gpus", "memory_free", "nodes", "rooms", "state", "used")

    def __init__(self, state: NodeState, used: Used, idle: "Profile | None" = None, rooms: tuple["Room", ...] = ()) -> None:
        self.state, self.used, self.rooms = state, used, rooms
        self.idle = idle or self
        self.nodes = 0
        self.cores = free_cores(state, used)
        self.idle_gpus = idle_gpus(state, used)
        self.choices: dict[Hashable, Ranked | Misfit] = {}
        gpus = zip(state.gpus, used, strict=True)
        self.memory_free = sum(max(0, gpu.memory_mebibytes - held.memory_mebibytes) for gpu, held in gpus if gpu.offered)

    def keep(self, key: Hashable, choice: Ranked | Misfit) -> None:
        if len(self.choices) >= (_KEPT_BY_IDLE if self.idle is self else _KEPT_CHOICES):
            del self.choices[next(iter(self.choices))]
        self.choices[key] = choice


class Room:
    """Equal GPUs with equal use, and the `nodes` that have such a GPU. `key` orders rooms as a share prefers them: by free cores, then by
    free memory."""

    __slots__ = ("blocks_free", "cores_free", "gpu", "idle", "key", "memory_free", "nodes", "offered", "usable", "used")

    def __init__(self, gpu: GpuState, used: Amounts) -> None:
        self.gpu, self.used, self.nodes = gpu, used, 0
        self.cores_free = max(0, CORES_PER_GPU - used.cores)
        self.memory_free = max(0, gpu.memory_mebibytes - used.memory_mebibytes)
        self.blocks_free = self.memory_free // BLOCK_MEBIBYTES
        self.idle = not (used.cores or used.memory_mebibytes)
        self.offered = gpu.offered
        self.usable = usable_cores(gpu, self.cores_free, self.memory_free)
        self.key = self.cores_free, self.memory_free

    def taken_by(self, wanted: Amounts) -> FreeCores:
        """What a share takes of the GPU's free cores."""
        cores, memory = self.cores_free - wanted.cores, self.memory_free - wanted.memory_mebibytes
        tight = tight_cores(wanted.cores, cores, entirely_free=self.used == NOTHING)
        return FreeCores(wanted.cores, self.usable - usable_cores(self.gpu, cores, memory), tight)


_by_key = attrgetter("key")


def free_cores(node: NodeState, used: Used) -> FreeCores:
    return _sum_of_free(zip(node.gpus, used, strict=True))


def taken_cores(node: NodeState, before: Used, after: Used, gpus: Iterable[int]) -> FreeCores:
    """The difference of `free_cores` between `before` and `after`, if only these GPUs differ."""
    free, left = (_sum_of_free((node.gpus[gpu], used[gpu]) for gpu in gpus) for used in (before, after))
    return FreeCores(free.free - left.free, free.usable - left.usable)


def _sum_of_free(gpus: Iterable[tuple[GpuState, Amounts]]) -> FreeCores:
    free = usable = 0
    for gpu, held in gpus:
        if gpu.offered:
            cores = max(0, CORES_PER_GPU - held.cores)
            free += cores
            usable += usable_cores(gpu, cores, max(0, gpu.memory_mebibytes - held.memory_mebibytes))
    return FreeCores(free, usable)


def usable_cores(gpu: GpuState, cores_free: int, memory_free: int) -> int:
    """The free cores for which there is memory, if memory is divided in proportion to cores."""
    return min(cores_free, memory_free * CORES_PER_GPU // gpu.memory_mebibytes) if gpu.memory_mebibytes else cores_free


def idle_gpus(node: NodeState, used: Used) -> int:
    return sum(not (held.cores or held.memory_mebibytes) and gpu.offered for gpu, held in zip(node.gpus, used, strict=True))


def tight_cores(taken: int, left: int, *, entirely_free: bool) -> int:
    """How well a share fills its GPU, in cores. The result is higher if less is left, and if the GPU was in use before."""
    return -left if entirely_free else taken - left


_KindKey = tuple[Topology, Naming, tuple[GpuState, ...]]


@dataclass
class _Kind:
    """Nodes that differ only by name and use. `gpus`: their GPUs without index and NUMA node, which a share ignores."""

    key: _KindKey
    state: NodeState
    gpus: tuple[GpuState, ...]
    profiles: dict[Used, Profile] = field(default_factory=dict)
    idle: dict[Used, Profile] = field(default_factory=dict)


class Place(msgspec.Struct):
    """A node with its groups. `counted`: its GPUs as quotas distinguish them. `cpu_free`: thousandths; None: not known."""

    name: str
    slot: int
    state: NodeState
    counted: frozenset[CountedGpu]
    kind: _Kind
    profile: Profile
    cpu_free: int | None


class Profiles:
    """The groups of all nodes. `rooms` are sorted by key. Sets of nodes: `all`; `with_gpus`; `with_mig`; `unnamed`, where the agent chooses
    the GPUs; `short_of_cpu`, with less free CPU than their usable cores need. A set from an object with another `numbering` is void."""

    def __init__(self, cpu_per_core: int, numbering: int = 0) -> None:
        self.cpu_per_core, self.numbering = cpu_per_core, numbering
        self.places: dict[str, Place] = {}
        #: Also has names without a node, so a node that is created (again) later has the same slot.
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._by_slot: list[Place | None] = []
        #: Number of idle GPUs -> nodes that have so many; GPUs as quotas distinguish them -> nodes that have these.
        self.by_idle_gpus, self.by_counted = defaultdict[int, int](int), defaultdict[frozenset[CountedGpu], int](int)
        self.rooms: list[Room] = []
        self.all = self.with_gpus = self.with_mig = self.unnamed = self.short_of_cpu = 0
        self._room_of: dict[tuple[GpuState, Amounts], Room] = {}
        self._kinds: dict[_KindKey, _Kind] = {}

    def there(self, nodes: int, *, idle: bool) -> list[Profile]:
        """The profiles of these nodes; with `idle`, the profiles in which each used GPU counts as full."""
        groups = [kind.idle if idle else kind.profiles for kind in self._kinds.values()]
        if nodes.bit_count() < sum(map(len, groups)):
            return list(dict.fromkeys(each.profile.idle if idle else each.profile for each in self.places_of(nodes)))
        return [each for group in groups for each in group.values() if each.nodes & nodes]

    def rooms_of(self, nodes: int) -> list[Room]:
        """The rooms on these nodes, sorted by key; rooms of other nodes may be among them."""
        if nodes.bit_count() > _FEW:
            return self.rooms
        return sorted({room for place in self.places_of(nodes) for room in place.profile.rooms}, key=_by_key)

    def with_idle_gpus(self, count: int) -> int:
        return reduce(or_, (nodes for idle, nodes in self.by_idle_gpus.items() if idle >= count), 0)

    def nodes_of(self, names: frozenset[str]) -> int:
        """The set of these nodes. Names without a node are in the set, too, unless they are too many."""
        for name in names.difference(self._slots):
            if self.sparse:
                names = names.intersection(self._slots)
                break
            self._slot(name)
        bits = bytearray(b"0") * (len(self._by_slot) + 1)
        for slot in map(self._slots.__getitem__, names):
            bits[~slot] = _ONE
        return int(bits, 2)

    def places_of(self, nodes: int) -> Iterator[Place]:
        return filter(None, _at(self._by_slot, nodes))

    def in_order(self, nodes: int) -> list[Place]:
        return sorted(self.places_of(nodes), key=_name)

    def names_of(self, nodes: int) -> list[str]:
        return list(_at(self._names, nodes))

    def put(self, state: NodeState, used: Used, cpu_free: int | None) -> None:
        """Adds the node, or moves it to the groups of its new state."""
        place = self.places.get(state.name)
        kind, counted = (
            (place.kind, place.counted)
            if place is not None and place.state is state
            else (self._kind(state), frozenset(state.counted_gpus))
        )
        profile = kind.profiles.get(used) or self._profile(kind, used)
        if place is not None and place.profile is profile and place.counted == counted:
            place.state, place.cpu_free = state, cpu_free
        else:
            if place is not None:
                self._leave(place)
            slot = self._slot(state.name)
            self.places[state.name] = self._by_slot[slot] = place = Place(
                state.name, slot, state, counted, kind, profile, cpu_free
            )
            self._enter(place)
        short, bit = cpu_free is not None and cpu_free < profile.cores.usable * self.cpu_per_core, 1 << place.slot
        self.short_of_cpu = self.short_of_cpu | bit if short else self.short_of_cpu & ~bit

    def _slot(self, name: str) -> int:
        if (known := self._slots.get(name)) is not None:
            return known
        slot = self._slots[name] = len(self._names)
        self._names.append(name)
        self._by_slot.append(None)
        return slot

    def remove(self, name: str) -> None:
        if (place := self.places.pop(name, None)) is not None:
            self._leave(place)
            self._by_slot[place.slot] = None

    @property
    def sparse(self) -> bool:
        """Whether many slots are unused."""
        return len(self._slots) > 2 * len(self.places) + _UNUSED_SLOTS

    def _enter(self, place: Place) -> None:
        """Adds the node to its groups. A group is kept only while it has nodes."""
        bit, state, kind, profile = 1 << place.slot, place.state, place.kind, place.profile
        self._kinds[kind.key], kind.profiles[profile.used], kind.idle[profile.idle.used] = kind, profile, profile.idle
        for room in profile.rooms:
            if not room.nodes:
                insort(self.rooms, room, key=_by_key)
                self._room_of[room.gpu, room.used] = room
        for group in _groups(profile):
            group.nodes |= bit
        self.by_idle_gpus[profile.idle_gpus] |= bit
        self.by_counted[place.counted] |= bit
        self.all |= bit
        self.with_gpus |= bit if state.gpus else 0
        self.with_mig |= bit if any(gpu.mig for gpu in state.gpus) else 0
        self.unnamed |= bit if state.naming == "none" else 0

    def _leave(self, place: Place) -> None:
        bit, kind, profile = 1 << place.slot, place.kind, place.profile
        for group in _groups(profile):
            group.nodes &= ~bit
        self.by_idle_gpus[profile.idle_gpus] &= ~bit
        self.by_counted[place.counted] &= ~bit
        if not self.by_counted[place.counted]:
            del self.by_counted[place.counted]
        for room in profile.rooms:
            if not room.nodes:
                position = bisect_left(self.rooms, room.key, key=_by_key)
                while self.rooms[position] is not room:
                    position += 1
                del self.rooms[position], self._room_of[room.gpu, room.used]
        if not profile.idle.nodes:
            del kind.idle[profile.idle.used]
        if not profile.nodes:
            del kind.profiles[profile.used]
        if not kind.profiles:
            del self._kinds[kind.key]
        self.with_gpus, self.with_mig, self.unnamed = (each & ~bit for each in (self.with_gpus, self.with_mig, self.unnamed))
        self.all, self.short_of_cpu = self.all & ~bit, self.short_of_cpu & ~bit

    def _kind(self, state: NodeState) -> _Kind:
        gpus = tuple(replace(gpu, uuid=_SOME_UUID if gpu.uuid else "") for gpu in state.gpus)
        key = (state.topology, state.naming, gpus)
        if (known := self._kinds.get(key)) is not None:
            return known
        seen = tuple(replace(gpu, index=None, numa=-1) for gpu in gpus)
        return _Kind(key, NodeState(name="", topology=state.topology, naming=state.naming, gpus=gpus), seen)

    def _profile(self, kind: _Kind, used: Used) -> Profile:
        """Makes a profile. In its `idle` profile a GPU with MIG devices does not count as full, because further devices may fit."""
        full = [
            Amounts(CORES_PER_GPU, gpu.memory_mebibytes) if held.cores and not gpu.mig else held
            for gpu, held in zip(kind.gpus, used, strict=True)
        ]
        idle = kind.idle.get(tuple(full)) or Profile(kind.state, tuple(full))
        rooms = {key: self._room_of.get(key) or Room(*key) for key in zip(kind.gpus, used, strict=True) if not key[0].mig}
        return Profile(kind.state, used, idle, tuple(rooms.values()))


_name = attrgetter("name")


def _at(items: Sequence[_T], nodes: int) -> Iterator[_T]:
    """The items with the positions of the set's bits."""
    if nodes.bit_count() > _ONE_BY_ONE:
        return compress(items, bin(nodes)[:1:-1].encode().translate(_FROM_DIGITS))
    found: list[int] = []
    while nodes:
        found.append(nodes.bit_length() - 1)
        nodes ^= 1 << found[-1]
    return map(items.__getitem__, reversed(found))


def _groups(profile: Profile) -> Iterator[Profile | Room]:
    yield profile
    if profile.idle is not profile:
        yield profile.idle
    yield from profile.rooms
