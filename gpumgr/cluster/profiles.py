"""Groups of nodes that differ only by name, so that a request is computed once for each group.

A group stays as it is for as long as it has nodes: a node moves to another group when its use changes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace

from gpumgr.cluster.node import GpuState, Naming, NodeState, Used
from gpumgr.topology.devices import Topology

#: Stands for any UUID that no request names.
_SOME_UUID = "GPU"


class Profile:
    """Nodes on which a request that names none of their GPUs finds the same. `state` is such a node; `names` are sorted."""

    __slots__ = ("names", "state", "used")

    def __init__(self, state: NodeState, used: Used) -> None:
        self.state, self.used = state, used
        self.names: list[str] = []

    def first_of(self, offered: Set[str]) -> str | None:
        return next((name for name in self.names if name in offered), None)


_KindKey = tuple[Topology, Naming, tuple[GpuState, ...]]


@dataclass
class _Kind:
    """Equal nodes, with any use of their GPUs."""

    key: _KindKey
    state: NodeState
    profiles: dict[Used, Profile] = field(default_factory=dict)


class Profiles:
    """`by_name`: the profile of each node."""

    def __init__(self) -> None:
        self.by_name: dict[str, Profile] = {}
        self._kind_of: dict[str, _Kind] = {}
        self._kinds: dict[_KindKey, _Kind] = {}
        #: Profiles that got their first node or lost their last one, in this order; the first of them has the number `_forgotten`.
        self._changes: list[Profile] = []
        self._forgotten = 0

    def __iter__(self) -> Iterator[Profile]:
        return (profile for kind in self._kinds.values() for profile in kind.profiles.values())

    def put(self, state: NodeState, used: Used) -> None:
        """The node is new or has changed."""
        self.remove(state.name)
        gpus = tuple(replace(gpu, uuid=_SOME_UUID if gpu.uuid else "") for gpu in state.gpus)
        key = (state.topology, state.naming, gpus)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(key, NodeState(name="", topology=state.topology, naming=state.naming, gpus=gpus))
        profile = kind.profiles.get(used)
        if profile is None:
            profile = kind.profiles[used] = Profile(kind.state, used)
            self._changed(profile)
        insort(profile.names, state.name)
        self.by_name[state.name], self._kind_of[state.name] = profile, kind

    def remove(self, name: str) -> None:
        profile = self.by_name.pop(name, None)
        if profile is None:
            return
        kind = self._kind_of.pop(name)
        del profile.names[bisect_left(profile.names, name)]
        if not profile.names:
            del kind.profiles[profile.used]
            self._changed(profile)
            if not kind.profiles:
                del self._kinds[kind.key]

    @property
    def version(self) -> int:
        """The number of changes."""
        return self._forgotten + len(self._changes)

    def changed_since(self, version: int) -> Iterable[Profile] | None:
        """Profiles that have come or gone, each once; None: too many changes ago."""
        return dict.fromkeys(self._changes[version - self._forgotten :]) if version >= self._forgotten else None

    def _changed(self, profile: Profile) -> None:
        self._changes.append(profile)
        if len(self._changes) > 1000 + 2 * len(self.by_name):
            half = len(self._changes) // 2
            self._forgotten += half
            del self._changes[:half]
