"""A question to the index: which nodes fit a request, which are the best, and why none fits."""

from collections.abc import Hashable, Iterable, Iterator
from functools import reduce
from itertools import chain
from operator import or_
from typing import Final, NamedTuple

from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection, bounded, explain
from gpumgr.cluster.core.index import ClusterIndex, Names
from gpumgr.cluster.core.node import covers
from gpumgr.cluster.core.profiles import Rank
from gpumgr.cluster.core.quota import types_of
from gpumgr.cluster.core.request import GpuType, PodRequest, Policy
from gpumgr.cluster.core.shape import Found, Shape
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import UNCONSTRAINED

#: About 2 kB each at 5,000 nodes. They are kept because waiting pods ask again and again.
_MAX_REJECTIONS: Final = 12_000


class Denial(NamedTuple):
    """What a quota denies a pod on these nodes. `types`: GPUs with which the pod would exceed the quota; `entire`: the nodes have no
    other GPUs."""

    nodes: int
    types: frozenset[GpuType]
    entire: bool
    reason: str


class Question:
    """`namespace`: GPUs that its quota denies do not fit; None: no quota counts. `keep` False: stores no result, so those for
    kube-scheduler's calls stay. `names` in the methods: the nodes that kube-scheduler offers.

    A choice takes up to a millisecond for each profile (group of equal nodes). `examine` does this slow part in steps, so other methods
    then take a few milliseconds.
    """

    def __init__(
        self, index: ClusterIndex, request: PodRequest, policy: Policy, namespace: str | None = None, *, keep: bool = True
    ) -> None:
        self.request, self.policy = request, policy
        self._index, self._keep = index, keep
        self._namespace = namespace if namespace in index.quotas.limits else None
        #: By the index's numbering and the types of GPUs that the quota denies.
        self._shapes: dict[tuple[int, frozenset[GpuType]], Shape] = {}

    def examine(self, names: Names, most: int | None = 1, *, reasons: bool = True) -> Iterator[None]:
        """Prepares `rank` (with `most` None: `order`; without `reasons`: `fits`). Each step takes less than a millisecond."""
        nodes = self._index.node_set(names)
        if self._known(nodes) is None:
            for shape, part in self._parts(nodes):
                yield from shape.examine(self._named(part)[1], most, reasons=reasons)
                yield

    def rank(self, names: Names, most: int = 1) -> list[tuple[str, NodeChoice]] | Rejection:
        """At most `most` nodes, the best first."""
        nodes = self._index.node_set(names)
        if (known := self._known(nodes)) is not None:
            return known
        if found := self.best(nodes, most):
            return [each[1:] for each in found]
        rejection, kept = self._rejection(nodes), self._index.rejections
        if self._keep:
            if len(kept) >= _MAX_REJECTIONS:
                kept.clear()
            kept[self._asked(nodes)] = rejection
        return rejection

    def best(self, names: Names, most: int = 1) -> list[tuple[Rank, str, NodeChoice]]:
        """The nodes of `rank` with their ranks; empty if no node fits."""
        found = self._fitting(names, most)
        made = (
            (rank, name, self._choice_on(name, shape) if room is None else shape.in_room(room, name))
            for (rank, name, room), shape in found
        )
        return [(rank, name, choice) for rank, name, choice in made if isinstance(choice, NodeChoice)]

    def order(self, names: Names, most: int | None = None) -> list[str]:
        """The names of the nodes of `best`; `most` None: of all nodes that fit."""
        return [name for (_, name, _), _ in self._fitting(names, most)]

    def fits(self, names: Names) -> bool:
        """Whether any of these nodes fits."""
        return bool(self._fitting(names, 1, enough=1))

    def denials(self, nodes: int) -> list[Denial]:
        """One for each group of nodes with the same GPUs."""
        if self._namespace is None:
            return []
        groups = [(gpus, nodes & there) for gpus, there in self._index.profiles.by_counted.items() if nodes & there]
        denied = self._index.quotas.denied(self._namespace, chain.from_iterable(gpus for gpus, _ in groups), self.request)
        return [
            Denial(there, types_of(gpus & denied.keys()), gpus <= denied.keys(), min(denied[gpu] for gpu in gpus & denied.keys()))
            for gpus, there in groups
            if gpus & denied.keys()
        ]

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _asked(self, nodes: int) -> Hashable:
        limits = self._index.quotas.limits.get(self._namespace) if self._namespace is not None else None
        return self._index.numbering, self._namespace, limits, self.request.gpu_digest, self.policy, nodes

    def _known(self, nodes: int) -> Rejection | None:
        return self._index.rejections.get(self._asked(nodes)) if self._keep else None

    def _parts(self, nodes: int) -> list[tuple[Shape, int]]:
        denials = self.denials(nodes)
        left = nodes & ~reduce(or_, (each.nodes for each in denials), 0)
        parts = {frozenset[GpuType](): left}
        for each in denials:
            if not each.entire:
                parts[each.types] = parts.get(each.types, 0) | each.nodes
        return [(self._shape(types), part) for types, part in parts.items() if part]

    def _shape(self, denied: frozenset[GpuType]) -> Shape:
        profiles = self._index.profiles
        key = profiles.numbering, denied
        if key not in self._shapes:
            request = replace(self.request, denied=denied) if denied else self.request
            self._shapes[key] = Shape(request, self.policy, profiles, keep=self._keep)
        return self._shapes[key]

    def _fitting(self, names: Names, most: int | None, enough: int | None = None) -> list[tuple[Found, Shape]]:
        found = list[tuple[Found, Shape]]()
        for shape, part in self._parts(self._index.node_set(names)):
            named, others = self._named(part)
            choices = [(name, self._choice_on(name, shape)) for name in named]
            fits = [(shape.rank_on(name, choice), name, None) for name, choice in choices if isinstance(choice, NodeChoice)]
            found += [(each, shape) for each in (*shape.fitting(others, most, enough=enough), *fits)]
        return sorted(found, key=lambda each: each[0][:2])[:most]

    def _named(self, nodes: int) -> tuple[list[str], int]:
        """(names of nodes with GPUs that the request names, the set of the other known nodes)."""
        profiles = self._index.profiles
        nodes &= profiles.all
        if self.request.constraints == UNCONSTRAINED:
            return [], nodes
        there = nodes & profiles.nodes_of(frozenset(self._index.with_gpus(self.request.constraints.uuids)))
        return sorted(profiles.names_of(there)), nodes & ~there

    def _choice_on(self, name: str, shape: Shape) -> NodeChoice | Misfit:
        node = self._index.node(name)
        return choose(node, self._index.used(name), shape.request, self.policy) if node is not None else Misfit(container=None)

    def _rejection(self, nodes: int) -> Rejection:
        """The quota is the reason for all nodes on which it denies GPUs. Call it only if no node fits."""
        denials = self.denials(nodes)
        by_quota = reduce(or_, (each.nodes for each in denials), 0)
        count, others = by_quota.bit_count(), (nodes & ~by_quota).bit_count()
        text = self._reasons(nodes & ~by_quota) if others else ""
        if not denials:
            return Rejection(text)
        rest = f"; the other node {text}" if others == 1 else f"; {text}" if text else ""
        reasons = "; ".join(sorted({each.reason for each in denials}))
        return Rejection(bounded(f"for the quota of {'1 node' if count == 1 else f'{count} nodes'}: {reasons}{rest}"))

    def _reasons(self, nodes: int) -> str:
        shape, unknown = self._shape(frozenset()), nodes & ~self._index.profiles.all
        named, others = self._named(nodes)
        closest = [*shape.misfits(others), *((1, name, None) for name in named)]
        if unknown:
            closest.append((unknown.bit_count(), min(self._index.names(unknown)), None))
        misfits = ((count, name, misfit or self._choice_on(name, shape)) for count, name, misfit in closest)
        return explain((count, name, each) for count, name, each in misfits if isinstance(each, Misfit))


class Largest(NamedTuple):
    """`idle_gpus`: the most idle GPUs of one node. `free`: what is free on single GPUs, except where another GPU has at least as much of
    both."""

    idle_gpus: int
    free: tuple[Amounts, ...]

    @classmethod
    def on(cls, index: ClusterIndex, nodes: int) -> "Largest":
        profiles = index.profiles
        rooms = (room for room in profiles.rooms_of(nodes) if room.offered and room.nodes & nodes)
        idle_gpus = max((idle for idle, there in profiles.by_idle_gpus.items() if there & nodes), default=0)
        return cls(idle_gpus, _frontier(Amounts(room.cores_free, room.memory_free) for room in rooms))

    def may_fit(self, request: PodRequest) -> bool:
        """Whether each container, without the others, fits on some node; True for HAMi's resources, which are not examined."""
        return all(
            each.replica is not None
            or (each.gpus <= self.idle_gpus if each.whole else any(covers(free, each.share) for free in self.free))
            for each in request.containers
        )


def _frontier(sums: Iterable[Amounts]) -> tuple[Amounts, ...]:
    best: list[Amounts] = []
    for each in sorted(set(sums), key=lambda each: (-each.cores, -each.memory_mebibytes)):
        if not best or each.memory_mebibytes > best[-1].memory_mebibytes:
            best.append(each)
    return tuple(best)
