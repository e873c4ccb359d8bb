"""Groups of nodes that differ only by name, so that a request is computed once for each group.

A group stays as it is for as long as it has nodes: a node moves to another group when its use changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpumgr.cluster.choose import Misfit, NodeChoice
from gpumgr.cluster.node import GpuState, Naming, NodeState, Used
from gpumgr.cluster.request import PodRequest
from gpumgr.topology.devices import Topology

#: Stands for any UUID that no request names. No annotation contains it, since names in annotations are stripped.
_SOME_UUID: Final = " "


class Profile:
    """Nodes on which a request that names none of their GPUs finds the same. `state` is such a node; `nodes` counts them. `choices`: for
    requests that differ only by CPU."""

    __slots__ = ("choices", "nodes", "state", "used")

    def __init__(self, state: NodeState, used: Used) -> None:
        self.state, self.used = state, used
        self.choices: dict[PodRequest, NodeChoice | Misfit] = {}
        self.nodes = 0


_KindKey = tuple[Topology, Naming, tuple[GpuState, ...]]


@dataclass
class _Kind:
    """Equal nodes, with any use of their GPUs."""

    key: _KindKey
    state: NodeState
    profiles: dict[Used, Profile] = field(default_factory=dict)


class Profiles:
    """`by_name`: the profile of each node; `cpu_free`: its free CPU in thousandths, where that is known."""

    def __init__(self) -> None:
        self.by_name: dict[str, Profile] = {}
        self.cpu_free: dict[str, int | None] = {}
        #: Of each node its state, for which the kind was found.
        self._kind_of: dict[str, tuple[NodeState, _Kind]] = {}
        self._kinds: dict[_KindKey, _Kind] = {}
        #: (name, True if the node has got another profile or none, False if only its free CPU has changed), in this order; the first of
        #: them has the number `_forgotten`.
        self._changes: list[tuple[str, bool]] = []
        self._forgotten = 0

    def put(self, state: NodeState, used: Used, cpu_free: int | None) -> None:
        """The node is new or has changed."""
        known, kind = self._kind_of.get(state.name, (None, None))
        if kind is None or known is not state:
            kind = self._kind(state)
        profile = kind.profiles.get(used)
        if profile is None:
            profile = kind.profiles[used] = Profile(kind.state, used)
        if self.by_name.get(state.name) is not profile:
            profile.nodes += 1
            self.remove(state.name)
            self.by_name[state.name] = profile
        elif self.cpu_free[state.name] != cpu_free:
            self._record(state.name, gpus=False)
        self.cpu_free[state.name] = cpu_free
        self._kind_of[state.name] = (state, kind)

    def _record(self, name: str, *, gpus: bool = True) -> None:
        self._changes.append((name, gpus))
        if len(self._changes) > 1000 + 2 * len(self.by_name):
            half = len(self._changes) // 2
            self._forgotten += half
            del self._changes[:half]

    def remove(self, name: str) -> None:
        self._record(name)
        profile = self.by_name.pop(name, None)
        if profile is None:
            return
        del self.cpu_free[name]
        _, kind = self._kind_of.pop(name)
        profile.nodes -= 1
        if not profile.nodes:
            del kind.profiles[profile.used]
            if not kind.profiles:
                del self._kinds[kind.key]

    @property
    def version(self) -> int:
        """The number of changes."""
        return self._forgotten + len(self._changes)

    def changed_since(self, version: int) -> Sequence[tuple[str, bool]] | None:
        """Names of nodes, and whether their profile has changed or only the free CPU; None: too many changes ago."""
        return self._changes[version - self._forgotten :] if version >= self._forgotten else None

    def _kind(self, state: NodeState) -> _Kind:
        gpus = tuple(replace(gpu, uuid=_SOME_UUID if gpu.uuid else "") for gpu in state.gpus)
        key = (state.topology, state.naming, gpus)
        if key not in self._kinds:
            self._kinds[key] = _Kind(key, NodeState(name="", topology=state.topology, naming=state.naming, gpus=gpus))
        return self._kinds[key]
