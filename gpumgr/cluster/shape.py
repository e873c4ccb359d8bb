"""What one request finds in a cluster, kept up to date profile by profile."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Final

from gpumgr.cluster.choose import Misfit, NodeChoice, Rank, choose
from gpumgr.cluster.profiles import Profile, Profiles
from gpumgr.cluster.request import PodRequest, Policy

#: A rank of a choice, or a distance of a misfit.
_Value = tuple[float, ...]
#: For each profile, about 500 bytes each: the requests of a cluster are few, as far as GPUs count.
_KEPT_CHOICES: Final = 32


@dataclass(frozen=True, slots=True)
class Rejection:
    """No node that was offered fits. `text` has the reasons."""

    text: str


class _Group:
    """Nodes with one value. `reason`: why they do not fit; None: they fit. `names` are sorted."""

    __slots__ = ("names", "reason", "value")

    def __init__(self, reason: tuple[object, ...] | None, value: _Value) -> None:
        self.reason, self.value = reason, value
        self.names: list[str] = []


class Shape:
    """One request under one policy. Only ranks are kept, since a choice is computed again at little cost for the node that is taken.

    `rejection`: the last one, for this version of the index and these names. Many pods with one request wait, and ask again and again.
    """

    def __init__(self, request: PodRequest, policy: Policy, cpu_per_core: int) -> None:
        self.request, self.policy, self._cpu_per_core = request, policy, cpu_per_core
        self._by_cpu = policy == "least-fragmentation"
        self._gpu_request = request.without_cpu
        self.rejection: tuple[int, Set[str], Rejection] | None = None
        self._version = -1
        self._group_of: dict[str, _Group] = {}
        #: By reason; the lowest value first.
        self._groups: dict[tuple[object, ...] | None, list[_Group]] = {None: []}

    def __len__(self) -> int:
        return len(self._group_of)

    def update(self, profiles: Profiles, most: int | None = None) -> None:
        """Computes what is new since the last call. `most`: only so many of the oldest changes, and nothing after too many changes."""
        changed, version = profiles.changed_since(self._version), profiles.version
        if most is not None:
            changed = (changed or [])[:most]
            version = self._version + len(changed)
        if changed is None:
            names: Iterable[str] = {**self._group_of, **profiles.by_name}
        else:
            names = dict.fromkeys(name for name, gpus in changed if gpus or self._by_cpu)
        found: dict[tuple[Profile, int | None], _Group] = {}
        for name in names:
            if (before := self._group_of.pop(name, None)) is not None:
                self._leave(before, name)
            if (profile := profiles.by_name.get(name)) is not None:
                key = profile, profiles.cpu_free[name] if self._by_cpu else None
                if (group := found.get(key)) is None:
                    group = found[key] = self._group(self._choice(profile), key[1])
                insort(group.names, name)
                self._group_of[name] = group
        self._version = version

    def rank(self, choice: NodeChoice, cpu_free: int | None) -> Rank:
        return choice.rank_with(cpu_free, self.request.cpu_milli, self._cpu_per_core)

    def fitting(self, offered: Set[str]) -> Iterator[tuple[_Value, str]]:
        """(rank, name) of the nodes that fit, the best one first."""
        return ((group.value, name) for group in self._groups[None] for name in group.names if name in offered)

    def misfits(self, offered: Set[str]) -> Iterator[tuple[int, str]]:
        """The number of nodes of each kind of misfit, and the node of them that lacks least. For nodes of which none fits."""
        counts = Counter(map(self._group_of.get, offered))
        if None in counts:  # not in the index
            yield counts[None], min(name for name in offered if name not in self._group_of)
        for groups in self._groups.values():
            if there := [group for group in groups if group in counts]:
                yield sum(counts[group] for group in there), next(name for name in there[0].names if name in offered)

    def _choice(self, profile: Profile) -> NodeChoice | Misfit:
        if not self._by_cpu:
            return choose(profile.state, profile.used, self.request, self.policy)
        choice = profile.choices.get(self._gpu_request)
        if choice is None:
            if len(profile.choices) == _KEPT_CHOICES:
                profile.choices.clear()
            choice = choose(profile.state, profile.used, self._gpu_request, self.policy)
            profile.choices[self._gpu_request] = choice
        return choice

    def _group(self, found: NodeChoice | Misfit, cpu_free: int | None) -> _Group:
        # Misfits that have one reason are compared.
        reason = found.reason if isinstance(found, Misfit) else None
        value: _Value = (found.distance,) if isinstance(found, Misfit) else self.rank(found, cpu_free)
        groups = self._groups.setdefault(reason, [])
        place = bisect_left(groups, value, key=_value)
        if place == len(groups) or groups[place].value != value:
            groups.insert(place, _Group(reason, value))
        return groups[place]

    def _leave(self, group: _Group, name: str) -> None:
        del group.names[bisect_left(group.names, name)]
        if not group.names:
            groups = self._groups[group.reason]
            del groups[bisect_left(groups, group.value, key=_value)]


def _value(group: _Group) -> _Value:
    return group.value
