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


class _Order:
    """Profiles by a value, the lowest first."""

    def __init__(self) -> None:
        self._values: list[_Value] = []
        self._profiles: dict[_Value, list[Profile]] = {}

    def add(self, value: _Value, profile: Profile) -> None:
        if (found := self._profiles.get(value)) is not None:
            found.append(profile)
            return
        insort(self._values, value)
        self._profiles[value] = [profile]

    def remove(self, value: _Value, profile: Profile) -> None:
        found = self._profiles[value]
        found.remove(profile)
        if not found:
            del self._profiles[value], self._values[bisect_left(self._values, value)]

    def __iter__(self) -> Iterator[tuple[_Value, list[Profile]]]:
        return ((value, self._profiles[value]) for value in self._values)


class Shape:
    """One request under one policy. Only ranks are kept, since a choice is computed again at little cost for the node that is taken.

    `rejection`: the last one, for this version of the index and these names. Many pods with one request wait, and ask again and again.
    """

    def __init__(self, request: PodRequest, policy: Policy) -> None:
        self.request, self.policy = request, policy
        self.rejection: tuple[int, Set[str], Rejection] | None = None
        self._version = -1
        self._fits = _Order()
        self._misfits: dict[Misfit, _Order] = {}
        #: For each profile, and None for nodes that are not in the index.
        self._order_of: dict[Profile | None, _Order] = {None: self._order(Misfit(container=None))}
        self._value_of: dict[Profile, _Value] = {}

    def __len__(self) -> int:
        return len(self._value_of)

    def update(self, profiles: Profiles) -> None:
        """Computes what is new since the last call."""
        changed = profiles.changed_since(self._version)
        for profile in [*self._value_of, *profiles] if changed is None else changed:
            known = profile in self._value_of
            if profile.names and not known:
                self._add(profile)
            elif known and not profile.names:
                self._order_of.pop(profile).remove(self._value_of.pop(profile), profile)
        self._version = profiles.version

    def fitting(self, offered: Set[str]) -> Iterator[tuple[_Value, str]]:
        """(rank, name) of the nodes that fit, the best one first."""
        for rank, profiles in self._fits:
            found = [(rank, name) for profile in profiles for name in profile.names if name in offered]
            yield from sorted(found) if len(profiles) > 1 else found

    def misfits(self, offered: Set[str], profiles: Profiles) -> Iterator[tuple[int, str]]:
        """The number of nodes of each kind of misfit, and the node of them that lacks least. For nodes of which none fits."""
        counts = Counter(map(self._order_of.get, map(profiles.by_name.get, offered)))
        for order, count in counts.items():
            assert order is not None, "every profile has an order"
            names = (min(filter(None, (profile.first_of(offered) for profile in group)), default=None) for _, group in order)
            yield count, next(filter(None, names), None) or min(name for name in offered if name not in profiles.by_name)

    def _add(self, profile: Profile) -> None:
        found = choose(profile.state, profile.used, self.request, self.policy)
        value: _Value = found.rank if isinstance(found, NodeChoice) else (found.distance,)
        order = self._fits if isinstance(found, NodeChoice) else self._order(found)
        order.add(value, profile)
        self._order_of[profile], self._value_of[profile] = order, value

    def _order(self, misfit: Misfit) -> _Order:
        """Misfits that have one reason are in one order."""
        reason = replace(misfit, closest=None, free_gpus=0, distance=0.0)
        return self._misfits.setdefault(reason, _Order())
