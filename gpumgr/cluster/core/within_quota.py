"""The nodes that fit a pod within the quota of its namespace.

The pod is first placed without the GPUs on which the whole pod would exceed the quota. If no node fits then, a pod with several GPUs may
get as many of these GPUs as the quota allows.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, islice
from operator import itemgetter, or_
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import MAX_CHARACTERS
from gpumgr.cluster.core.index import ClusterIndex, Names, NodeSet
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.profiles import Profile
from gpumgr.cluster.core.quota import Denial, Quotas
from gpumgr.cluster.core.request import GpuType, PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection, Shape

#: The most rejections that are kept, about 2 kB each at 5,000 nodes: many waiting pods ask again and again.
_MAX_REJECTIONS: Final = 12_000
#: The most nodes on which `_divided` looks for a choice that the quota allows; for a pod with n containers, an n-th of it.
_MOST_NODES: Final = 32
_Ranked = list[tuple[str, NodeChoice]]
#: A shape of the request, and the nodes that are ranked with it.
_Part = tuple[Shape, NodeSet]
#: Each denial with its nodes as the bits of an integer.
_Denials = list[tuple[Denial, int]]


class KeptRejections(OrderedDict[Hashable, tuple[Hashable, Rejection]]):
    """Rejections for later questions: RankWithinQuota._key -> the _state, and the rejection in this state. The least recently used entry is
    dropped."""

    def find(self, key: Hashable) -> tuple[Hashable, Rejection] | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def keep(self, key: Hashable, answer: tuple[Hashable, Rejection]) -> None:
        self[key] = answer
        self.move_to_end(key)
        if len(self) > _MAX_REJECTIONS:
            self.popitem(last=False)


@dataclass
class RankWithinQuota:
    """`rank` answers as ClusterIndex.rank, without the nodes and GPUs that the quota denies. `examine` runs before it, and does the slow
    part in steps. `kept` None: nothing is kept for later questions, neither here nor in the index."""

    index: ClusterIndex
    quotas: Quotas
    namespace: str
    request: PodRequest
    policy: Policy
    names: Names
    most: int = 1
    kept: KeptRejections | None = None

    @cached_property
    def shape(self) -> Shape:
        return self._without(frozenset())

    def rank(self) -> _Ranked | Rejection:
        offered = self.index.node_set(self.names)
        if (known := self._known(offered)) is not None:
            return known
        found = self._rank(offered)
        if self.kept is not None and isinstance(found, Rejection):
            self.kept.keep(self._key, (self._state(offered), found))
        return found

    def examine(self) -> Iterator[None]:
        offered = self.index.node_set(self.names)
        if self._known(offered) is not None:
            return
        denials = self._denials(offered)
        parts = self._parts(offered, denials, whole=True)
        for shape, nodes in parts:
            yield from self.index.examine(shape, nodes, self.most)
            yield
        if (mixed := _mixed(denials)) and not self._best(parts):
            for shape, nodes in self._parts(offered, denials, whole=False):
                yield
                yield from self.index.examine(shape, nodes, None)
            yield
            yield from self.index.examine(self.shape, offered.within(mixed), None)

    @property
    def _limited(self) -> bool:
        return self.namespace in self.quotas.limits

    def _denials(self, offered: NodeSet) -> _Denials:
        found = ((each, self.index.node_set(each.nodes).nodes) for each in self.quotas.denials(self.namespace, self.request))
        return [(each, nodes & offered.nodes) for each, nodes in found if nodes & offered.nodes]

    @property
    def _key(self) -> Hashable:
        return self.namespace if self._limited else None, self.request.gpu_digest, self.policy

    def _state(self, nodes: NodeSet) -> Hashable:
        """All that an answer about these nodes depends on, besides `_key` and `most`. A change of what a namespace holds also changes the
        version of the index."""
        return self.index.version, self.quotas.limits.get(self.namespace), nodes

    def _known(self, offered: NodeSet) -> Rejection | None:
        """The kept rejection, if nothing has changed on which it depends."""
        known = self.kept.find(self._key) if self.kept is not None else None
        return known[1] if known is not None and known[0] == self._state(offered) else None

    def _rank(self, offered: NodeSet) -> _Ranked | Rejection:
        if not (denials := self._denials(offered)):
            return self.index.rank(self.shape, offered, self.most) if len(offered) else Rejection("")
        if found := self._best(self._parts(offered, denials, whole=True)):
            return found
        roomy = self.index.order(self.shape, offered.within(_mixed(denials)))
        return (self._divided(offered, denials) if roomy else None) or self._rejection(offered, denials, roomy)

    @cached_property
    def _shapes(self) -> dict[frozenset[GpuType], Shape]:
        return {}

    def _without(self, denied: frozenset[GpuType]) -> Shape:
        """The shape of the request if the pod can't have GPUs of these types."""
        if denied not in self._shapes:
            request = replace(self.request, denied=denied) if denied else self.request
            self._shapes[denied] = self.index.shape(request, self.policy, keep=self.kept is not None)
        return self._shapes[denied]

    def _parts(self, offered: NodeSet, denials: _Denials, *, whole: bool) -> list[_Part]:
        """The nodes on which the quota may allow a choice, grouped by the shape for them. With `whole`, the pod gets no GPU in
        Denial.whole. Otherwise it gets no GPU in Denial.each, and nodes on which both sets are equal are left out."""
        left, mixed = offered, dict[frozenset[GpuType], int]()
        for each, nodes in denials:
            denied = each.whole if whole else each.each
            left = left.without(nodes)
            if not each.entire and (whole or each.whole != each.each):
                mixed[denied] = mixed.get(denied, 0) | nodes
        parts = [(self._without(denied), offered.within(nodes)) for denied, nodes in mixed.items()]
        return [(self.shape, left), *parts] if whole and len(left) else parts

    def _best(self, parts: list[_Part]) -> _Ranked:
        found = chain.from_iterable(self.index.best(*part, self.most) for part in parts)
        return [(name, choice) for _, name, choice in sorted(found, key=itemgetter(0, 1))[: self.most]]

    def _divided(self, offered: NodeSet, denials: _Denials) -> _Ranked:
        """Choices with some of the GPUs in Denial.whole, for a pod with several GPUs."""
        different: dict[tuple[Profile, str, str, str], NodeState] = {}
        for name in chain.from_iterable(self.index.order(*part) for part in self._parts(offered, denials, whole=False)):
            node, named = self.index.node(name), name if self.request.constraints.uuids else ""
            assert node is not None, "a node that fits is in the index"
            different.setdefault((self.index.profile(name), node.model_label, node.pool, named), node)
        tried = islice(different.values(), max(1, _MOST_NODES // len(self.request.containers)))
        choices = (
            (node.name, self.quotas.choose(self.namespace, node, self.index.used(node.name), self.request, self.policy))
            for node in tried
        )
        allowed = ((name, choice) for name, choice in choices if isinstance(choice, NodeChoice))
        return list(islice(allowed, self.most))

    def _rejection(self, offered: NodeSet, denials: _Denials, roomy: list[str]) -> Rejection:
        """The quota is the reason for nodes that it denies entirely, and for the nodes in `roomy`: they have room for the pod, but the
        quota denies some of their GPUs."""
        denied, with_room = dict[str, int](), self.index.node_set(roomy).nodes
        for each, nodes in denials:
            if nodes := nodes if each.entire else nodes & with_room:
                denied[each.reason] = denied.get(each.reason, 0) | nodes
        left = reduce(NodeSet.without, denied.values(), offered)
        others, count = len(left), len(offered) - len(left)
        text = self.index.rejection(self.shape, left).text if others else ""
        if not denied:
            return Rejection(text)
        rest = f"; the other node {text}" if others == 1 else f"; {text}" if text else ""
        whole = f"for the quota of {'1 node' if count == 1 else f'{count} nodes'}: {'; '.join(sorted(denied))}{rest}"
        return Rejection(whole if len(whole) <= MAX_CHARACTERS else whole[: MAX_CHARACTERS - 4] + " ...")


def _mixed(denials: _Denials) -> int:
    """The nodes on which the quota denies some GPUs, but not every choice."""
    return reduce(or_, (nodes for each, nodes in denials if not each.entire), 0)
