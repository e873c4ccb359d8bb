"""What one request finds in a cluster, kept up to date profile by profile."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from gpumgr.cluster.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.profiles import Profile, Profiles
from gpumgr.cluster.request import PodRequest, Policy

#: A rank of a choice, or a distance of a misfit.
_Value = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rejection:
    """No node that was offered fits. `text` has the reasons."""

    text: str


class _Group:
    """Nodes with one value. `reason`: why they do not fit; None: they fit. `names` are sorted."""

    __slots__ = ("names", "reason", "value")

    def __init__(self, reason: Misfit | None, value: _Value) -> None:
        self.reason, self.value = reason, value
        self.names: list[str] = []


class Shape:
    """One request under one policy. Only ranks are kept, since a choice is computed again at little cost for the node that is taken.

    `rejection`: the last one, for this version of the index and these names. Many pods with one request wait, and ask again and again.
    """

    def __init__(self, request: PodRequest, policy: Policy) -> None:
        self.request, self.policy = request, policy
        self.rejection: tuple[int, Set[str], Rejection] | None = None
        self._version = -1
        self._group_of: dict[str, _Group] = {}
        #: By reason; the lowest value first.
        self._groups: dict[Misfit | None, list[_Group]] = {None: []}

    def __len__(self) -> int:
        return len(self._group_of)

    def update(self, profiles: Profiles, most: int | None = None) -> None:
        """Computes what is new since the last call. `most`: only so many of the oldest changes, and nothing after too many changes."""
        changed, version = profiles.changed_since(self._version), profiles.version
        if most is not None:
            changed = (changed or [])[:most]
            version = self._version + len(changed)
        found: dict[Profile, _Group] = {}
        for name in {**self._group_of, **profiles.by_name} if changed is None else dict.fromkeys(changed):
            if (before := self._group_of.pop(name, None)) is not None:
                self._leave(before, name)
            if (profile := profiles.by_name.get(name)) is not None:
                group = found.get(profile) or self._group(profile)
                insort(group.names, name)
                self._group_of[name] = found[profile] = group
        self._version = version

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

    def _group(self, profile: Profile) -> _Group:
        found = choose(profile.state, profile.used, self.request, self.policy)
        if isinstance(found, NodeChoice):
            group = _Group(None, found.rank)
        else:  # misfits that have one reason are compared
            group = _Group(replace(found, closest=None, free_gpus=0, distance=0.0), (found.distance,))
        groups = self._groups.setdefault(group.reason, [])
        place = bisect_left(groups, group.value, key=_value)
        if place == len(groups) or groups[place].value != group.value:
            groups.insert(place, group)
        return groups[place]

    def _leave(self, group: _Group, name: str) -> None:
        del group.names[bisect_left(group.names, name)]
        if not group.names:
            groups = self._groups[group.reason]
            del groups[bisect_left(groups, group.value, key=_value)]


def _value(group: _Group) -> _Value:
    return group.value
