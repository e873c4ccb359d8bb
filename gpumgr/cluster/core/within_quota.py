"""The nodes that fit a pod within the quota of its namespace.

The pod is placed without the GPUs on which it would exceed the quota.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from operator import itemgetter
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import MAX_CHARACTERS
from gpumgr.cluster.core.index import ClusterIndex, Names, NodeSet
from gpumgr.cluster.core.quota import Denial, Quotas
from gpumgr.cluster.core.request import GpuType, PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection, Shape

#: The most rejections that are kept, about 2 kB each at 5,000 nodes: many waiting pods ask again and again.
_MAX_REJECTIONS: Final = 12_000
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
    """`rank` answers as ClusterIndex.rank, without the nodes and GPUs that the quota denies. `examine` does the slow part in steps; call it
    before `rank`. `kept` None: nothing is kept for later questions, neither here nor in the index."""

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
        for shape, nodes in self._parts(offered, self._denials(offered)):
            yield from self.index.examine(shape, nodes, self.most)
            yield

    @property
    def _limited(self) -> bool:
        return self.namespace in self.quotas.limits

    def _denials(self, offered: NodeSet) -> _Denials:
        if not self._limited:
            return []
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
        found = chain.from_iterable(self.index.best(*part, self.most) for part in self._parts(offered, denials))
        best = [(name, choice) for _, name, choice in sorted(found, key=itemgetter(0, 1))[: self.most]]
        return best or self._rejection(offered, denials)

    @cached_property
    def _shapes(self) -> dict[frozenset[GpuType], Shape]:
        return {}

    def _without(self, denied: frozenset[GpuType]) -> Shape:
        """The shape of the request if the pod can't have GPUs of these types."""
        if denied not in self._shapes:
            request = replace(self.request, denied=denied) if denied else self.request
            self._shapes[denied] = self.index.shape(request, self.policy, keep=self.kept is not None)
        return self._shapes[denied]

    def _parts(self, offered: NodeSet, denials: _Denials) -> list[_Part]:
        """The nodes on which the quota may allow a choice, grouped by the shape for them."""
        left = reduce(NodeSet.without, (nodes for _, nodes in denials), offered)
        mixed = defaultdict[frozenset[GpuType], int](int)
        for each, nodes in denials:
            if not each.entire:
                mixed[each.types] |= nodes
        parts = [(self._without(types), offered.within(nodes)) for types, nodes in mixed.items()]
        return [(self.shape, left), *parts] if len(left) else parts

    def _rejection(self, offered: NodeSet, denials: _Denials) -> Rejection:
        """The quota is the reason for all nodes on which it denies GPUs."""
        left = reduce(NodeSet.without, (nodes for _, nodes in denials), offered)
        others, count = len(left), len(offered) - len(left)
        text = self.index.rejection(self.shape, left).text if others else ""
        rest = f"; the other node {text}" if others == 1 else f"; {text}" if text else ""
        reasons = "; ".join(sorted({each.reason for each, _ in denials}))
        whole = f"for the quota of {'1 node' if count == 1 else f'{count} nodes'}: {reasons}{rest}"
        return Rejection(whole if len(whole) <= MAX_CHARACTERS else whole[: MAX_CHARACTERS - 4] + " ...")
