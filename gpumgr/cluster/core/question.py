"""A question to the index of the cluster's nodes: which nodes fit a request, which are the best, and why none fits."""

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
from gpumgr.cluster.core.node_search import Found, NodeSearch
from gpumgr.cluster.core.profiles import Rank
from gpumgr.cluster.core.quota import types_of
from gpumgr.cluster.core.request import GpuType, PodRequest, Policy
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import UNCONSTRAINED

#: The most rejections that are kept, about 2 kB each at 5,000 nodes. kube-scheduler asks again and again for pods that wait.
_MAX_REJECTIONS: Final = 12_000


class Denial(NamedTuple):
    """What a quota denies a pod on `nodes` (a set, as bits). `types`: the GPUs with which the pod would exceed the quota. `entire`: the
    nodes have no other GPUs."""

    nodes: int
    types: frozenset[GpuType]
    entire: bool
    reason: str


class Question:
    """GPUs that the quota of `namespace` denies do not fit; None: no quota applies. `keep` False: no result is stored, so that
    stored results for kube-scheduler's calls are not displaced. The `names` of the methods are the nodes that kube-scheduler offers.

    A choice takes up to a millisecond for each profile (group of equal nodes). `examine` does this slow part in steps. After it the other
    methods take a few milliseconds.
    """

    def __init__(
        self, index: ClusterIndex, request: PodRequest, policy: Policy, namespace: str | None = None, *, keep: bool = True
    ) -> None:
        self.request, self.policy = request, policy
        self._index, self._keep = index, keep
        self._namespace = namespace if namespace in index.quotas.limits else None
        #: By the index's numbering and the types of GPUs that the quota denies.
        self._searches: dict[tuple[int, frozenset[GpuType]], NodeSearch] = {}

    def examine(self, names: Names, most: int | None = 1, *, reasons: bool = True) -> Iterator[None]:
        """Computes in advance what `rank` needs; with `most` None, what `order` needs; without `reasons`, what `fits` needs. Each step
        takes less than a millisecond."""
        nodes = self._index.node_set(names)
        if self._known(nodes) is None:
            for search, part in self._parts(nodes):
                yield from search.examine(self._named(part)[1], most, reasons=reasons)
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
            (rank, name, self._choice_on(name, search) if room is None else search.in_room(room, name))
            for (rank, name, room), search in found
        )
        return [(rank, name, choice) for rank, name, choice in made if isinstance(choice, NodeChoice)]

    def order(self, names: Names, most: int | None = None) -> list[str]:
        """The names of the best nodes that fit, in order; `most` None: of all nodes that fit."""
        return [name for (_, name, _), _ in self._fitting(names, most)]

    def fits(self, names: Names) -> bool:
        """Whether any of these nodes fits."""
        return bool(self._fitting(names, 1, enough=1))

    def denials(self, nodes: int) -> list[Denial]:
        """What the quota denies, for each group of nodes with the same GPUs."""
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

    def _parts(self, nodes: int) -> list[tuple[NodeSearch, int]]:
        """Splits the nodes by the GPUs that the quota denies there, because these change the search. Nodes without other GPUs are left
        out."""
        denials = self.denials(nodes)
        left = nodes & ~reduce(or_, (each.nodes for each in denials), 0)
        parts = {frozenset[GpuType](): left}
        for each in denials:
            if not each.entire:
                parts[each.types] = parts.get(each.types, 0) | each.nodes
        return [(self._search(types), part) for types, part in parts.items() if part]

    def _search(self, denied: frozenset[GpuType]) -> NodeSearch:
        profiles = self._index.profiles
        key = profiles.numbering, denied
        if key not in self._searches:
            request = replace(self.request, denied=denied) if denied else self.request
            self._searches[key] = NodeSearch(request, self.policy, profiles, keep=self._keep)
        return self._searches[key]

    def _fitting(self, names: Names, most: int | None, enough: int | None = None) -> list[tuple[Found, NodeSearch]]:
        found = list[tuple[Found, NodeSearch]]()
        for search, part in self._parts(self._index.node_set(names)):
            named, others = self._named(part)
            choices = [(name, self._choice_on(name, search)) for name in named]
            fits = [(search.rank_on(name, choice), name, None) for name, choice in choices if isinstance(choice, NodeChoice)]
            found += [(each, search) for each in (*search.fitting(others, most, enough=enough), *fits)]
        return sorted(found, key=lambda each: each[0][:2])[:most]

    def _named(self, nodes: int) -> tuple[list[str], int]:
        """(names of nodes with GPUs that the request names, the set of the other known nodes)."""
        profiles = self._index.profiles
        nodes &= profiles.all
        if self.request.constraints == UNCONSTRAINED:
            return [], nodes
        there = nodes & profiles.nodes_of(frozenset(self._index.with_gpus(self.request.constraints.uuids)))
        return sorted(profiles.names_of(there)), nodes & ~there

    def _choice_on(self, name: str, search: NodeSearch) -> NodeChoice | Misfit:
        node = self._index.node(name)
        return choose(node, self._index.used(name), search.request, self.policy) if node is not None else Misfit(container=None)

    def _rejection(self, nodes: int) -> Rejection:
        """Why no node fits. On nodes where the quota denies GPUs, the quota is the reason. Call this only if no node fits."""
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
        search, unknown = self._search(frozenset()), nodes & ~self._index.profiles.all
        named, others = self._named(nodes)
        closest = [*search.misfits(others), *((1, name, None) for name in named)]
        if unknown:
            closest.append((unknown.bit_count(), min(self._index.names(unknown)), None))
        misfits = ((count, name, misfit or self._choice_on(name, search)) for count, name, misfit in closest)
        return explain((count, name, each) for count, name, each in misfits if isinstance(each, Misfit))


class Largest(NamedTuple):
    """A summary of what is free. `idle_gpus`: the most idle GPUs of one node. `free`: the largest free amounts of single GPUs: no other GPU
    has at least as many cores and as much memory free."""

    idle_gpus: int
    free: tuple[Amounts, ...]

    @classmethod
    def on(cls, index: ClusterIndex, nodes: int) -> "Largest":
        profiles = index.profiles
        rooms = (room for room in profiles.rooms_of(nodes) if room.offered and room.nodes & nodes)
        idle_gpus = max((idle for idle, there in profiles.by_idle_gpus.items() if there & nodes), default=0)
        return cls(idle_gpus, _frontier(Amounts(room.cores_free, room.memory_free) for room in rooms))

    def may_fit(self, request: PodRequest) -> bool:
        """Whether each container, without the others, fits on some node. Containers with HAMi's resources are not examined and count as
        fitting."""
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
