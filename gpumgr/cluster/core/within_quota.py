"""The nodes that fit a pod within the quota of its namespace.

If every choice of GPUs on a node exceeds the quota, the node is left out. On a node with different GPUs the quota depends on the
choice, so each such node is examined on its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, reduce
from itertools import chain
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import MAX_CHARACTERS
from gpumgr.cluster.core.index import ClusterIndex, Names, NodeSet
from gpumgr.cluster.core.node import GpuState, NodeState
from gpumgr.cluster.core.profiles import Profile
from gpumgr.cluster.core.quota import CountedGpu, Quotas, Trial, gpus_of
from gpumgr.cluster.core.request import PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection, Shape
from gpumgr.common.units import Amounts

#: The most rejections that are kept, about 2 kB each at 5,000 nodes: many waiting pods ask again and again.
_MAX_REJECTIONS: Final = 12_000
#: The most times that nodes are examined in steps, if nodes change in the meantime.
_MAX_ROUNDS: Final = 8
#: This many of the best nodes are tried first; all nodes only if the quota denies too many of them.
_FIRST_NODES: Final = 32
#: The most requests for which the denied nodes are kept, about 1 MB each at 5,000 nodes with different GPUs.
_MAX_DENIED: Final = 16
_Answer = TypeVar("_Answer")
_Value = TypeVar("_Value", bound=Hashable)


#: Groups the nodes of one profile: by their GPUs as limits count them and, if the request names GPUs, by name (otherwise "").
_Alike = tuple[frozenset[CountedGpu], str]


class _Examined(NamedTuple):
    """What does not depend on how much of the quota is used. `having`: the GPUs that have room for a container of the pod. `tried`: see
    Quotas.choose; None: nothing was tried, since the quota allowed none of `having`."""

    having: frozenset[CountedGpu]
    tried: tuple[Trial, ...] | None = None


@dataclass
class Denied:
    """The nodes on which a quota denies one request. `names`: reason -> nodes, as found for `checked` (the version of the index, the
    limits, the nodes, and how many of them are needed). `best`: as many allowed nodes as are needed; empty: all nodes were examined.
    `examined` forgets profiles that no node has."""

    checked: Hashable = None
    names: Mapping[str, Set[str]] = field(default_factory=dict)
    best: list[str] = field(default_factory=list)
    examined: WeakKeyDictionary[Profile, dict[_Alike, _Examined]] = field(default_factory=WeakKeyDictionary)


class _Kept(OrderedDict[Hashable, _Answer]):
    """At most `most` answers; the least recently used one is dropped."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find(self, key: Hashable) -> _Answer | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def keep(self, key: Hashable, answer: _Answer) -> _Answer:
        self[key] = answer
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
        return answer


class KeptAnswers:
    """Answers for later questions. `rejections`: RankWithinQuota._key -> the _state, and the answer."""

    def __init__(self) -> None:
        self.rejections = _Kept[tuple[Hashable, Rejection]](_MAX_REJECTIONS)
        self.denied = _Kept[Denied](_MAX_DENIED)


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
    kept: KeptAnswers | None = None

    @cached_property
    def shape(self) -> Shape:
        return self.index.shape(self.request, self.policy, keep=self.kept is not None)

    @cached_property
    def denied(self) -> Denied:
        if self.kept is None:
            return Denied()
        return self.kept.denied.find(self._key) or self.kept.denied.keep(self._key, Denied())

    def rank(self) -> list[tuple[str, NodeChoice]] | Rejection:
        offered = self.index.node_set(self.names)
        if (known := self._known(offered)) is not None:
            return known
        found = self._rank(offered) if self._limited else self._within_index(offered)
        if self.kept is not None and isinstance(found, Rejection):
            self.kept.rejections.keep(self._key, (self._state(offered), found))
        return found

    def examine(self) -> Iterator[None]:
        if self._known(self.index.node_set(self.names)) is not None:
            return
        yield from self.index.examine(self.shape, self.names, self.most)
        if not self._limited:
            return
        for _ in range(_MAX_ROUNDS):
            allowed = self._allowed(self.index.node_set(self.names))[1]
            if not len(allowed):
                return
            ranked = self._within_index(allowed)
            if isinstance(ranked, Rejection) or not self._exceeds(ranked):
                return
            yield
            yield from self._examine_each(allowed)
            if self.denied.checked == self._checked(allowed):
                return

    @property
    def _limited(self) -> bool:
        return self.namespace in self.quotas.limits

    @property
    def _key(self) -> Hashable:
        return self.namespace if self._limited else None, self.request.gpu_digest, self.policy

    def _state(self, nodes: NodeSet) -> Hashable:
        """All that an answer about these nodes depends on, besides `_key` and `most`. A change of what a namespace holds also changes the
        version of the index."""
        return self.index.version, self.quotas.limits.get(self.namespace), nodes

    def _known(self, offered: NodeSet) -> Rejection | None:
        """The kept rejection, if nothing has changed on which it depends."""
        known = self.kept.rejections.find(self._key) if self.kept is not None else None
        return known[1] if known is not None and known[0] == self._state(offered) else None

    def _checked(self, allowed: NodeSet) -> Hashable:
        return self._state(allowed), self.most

    def _rank(self, offered: NodeSet) -> list[tuple[str, NodeChoice]] | Rejection:
        excluded, allowed = self._allowed(offered)
        ranked = self._within_index(allowed)
        if isinstance(ranked, Rejection):
            return _rejection(excluded, offered, len(allowed), ranked.text) if allowed != offered else ranked
        if not self._exceeds(ranked):
            return ranked
        denied = self.denied
        if denied.checked != self._checked(allowed):
            for _ in self._examine_each(allowed):
                pass
        nodes = {text: self.index.node_set(names).nodes for text, names in denied.names.items()}
        left = self.index.node_set(denied.best) if denied.best else reduce(NodeSet.without, nodes.values(), allowed)
        ordered = self.index.order(self.shape, left, self.most) if len(left) else Rejection("")
        if isinstance(ordered, Rejection):
            return _rejection(excluded | nodes, offered, len(left), ordered.text)
        chosen = [
            (name, self.quotas.choose(self.namespace, self._node(name), self.index.used(name), self.request, self.policy))
            for name in ordered
        ]
        refused = {choice.text: left.nodes for _, choice in chosen if isinstance(choice, Rejection)}
        found = [(name, choice) for name, choice in chosen if isinstance(choice, NodeChoice)]
        return found or _rejection(excluded | nodes | refused, offered, 0, "")

    def _within_index(self, allowed: NodeSet) -> list[tuple[str, NodeChoice]] | Rejection:
        if not len(allowed):
            return Rejection("")
        return self.index.rank(self.shape, allowed, self.most)

    def _allowed(self, offered: NodeSet) -> tuple[dict[str, int], NodeSet]:
        """Reason -> the nodes on which every choice exceeds the quota; and the other nodes."""
        reasons = self.quotas.excluded(self.namespace, self.request)
        excluded = {text: self.index.node_set(nodes).nodes for text, nodes in reasons.items()}
        return excluded, reduce(NodeSet.without, excluded.values(), offered)

    def _exceeds(self, ranked: list[tuple[str, NodeChoice]]) -> bool:
        """Whether one of these choices exceeds the quota."""
        return any(
            self.quotas.refusal(self.namespace, self.quotas.choice_holding(choice, self.request, self._node(name)))
            for name, choice in ranked
        )

    def _node(self, name: str) -> NodeState:
        node = self.index.node(name)
        assert node is not None, "a node with a choice is in the index"
        return node

    def _examine_each(self, allowed: NodeSet) -> Iterator[None]:
        """Fills `denied`, one choice a step: first for the best nodes; then for all nodes, unless `most` of the best are allowed."""
        checked, names = self._checked(allowed), dict[str, set[str]]()
        closed = cache(lambda gpus: self.quotas.closed(self.namespace, gpus, self.request))
        denial = cache(lambda tried: self.quotas.denial(self.namespace, tried))
        first = self.index.order(self.shape, allowed, _FIRST_NODES + self.most)
        assert not isinstance(first, Rejection), "it has nodes that fit"
        others = set(self.index.names(allowed)).difference(first) if len(first) == _FIRST_NODES + self.most else ()
        yield
        best: list[str] = []
        for number, name in enumerate(chain(first, others)):
            if len(best) == self.most and number <= len(first):
                break
            if (node := self.index.node(name)) is None:
                continue  # removed in the meantime
            if reason := self._reason(node, closed, denial):
                names.setdefault(reason, set()).add(name)
            elif number < len(first):
                best.append(name)
            yield
        if self._checked(allowed) == checked:
            self.denied.names, self.denied.checked = names, checked
            self.denied.best = best if len(best) == self.most else []

    def _reason(
        self,
        node: NodeState,
        closed: Callable[[frozenset[CountedGpu]], Mapping[CountedGpu, str]],
        denial: Callable[[tuple[Trial, ...]], str | None],
    ) -> str:
        """Why the quota denies the pod every GPU of the node that has room for it, or "". The choices that were tried before are checked
        against the present quota. Other choices are tried only if these no longer decide."""
        gpus, used = self.quotas.gpus_on(node), self.index.used(node.name)
        examined = self.denied.examined.setdefault(self.index.profile(node.name), {})
        alike = gpus, node.name if self.request.constraints.uuids else ""
        if (known := examined.get(alike)) is None:
            places = zip(node.gpus, used, gpus_of(node), strict=False)
            known = _Examined(_shared(frozenset(each for gpu, held, each in places if _may_have(gpu, held, self.request))))
        if known.having and known.having <= closed(gpus).keys():
            reason: str | None = min(closed(gpus).values())
        else:
            reason = denial(known.tried) if known.tried is not None else None
        if reason is None:
            tried: list[Trial] = []
            choice = self.quotas.choose(self.namespace, node, used, self.request, self.policy, tried=tried)
            reason = choice.text if isinstance(choice, Rejection) else ""
            known = known._replace(tried=_shared(tuple(tried)))
        examined[alike] = known
        return reason


@lru_cache(maxsize=4096)
def _shared(value: _Value) -> _Value:
    """An equal value that was seen before, so that thousands of nodes keep one."""
    return value


def _rejection(excluded: dict[str, int], offered: NodeSet, others: int, text: str) -> Rejection:
    """`excluded`: reason -> nodes. `others`: how many other nodes were offered. `text`: why the other nodes do not fit."""
    reasons = "; ".join(sorted(reason for reason, nodes in excluded.items() if nodes & offered.nodes))
    count = len(offered) - others
    rest = f"; the other node {text}" if others == 1 else f"; {text}" if text else ""
    whole = f"for the quota of {'1 node' if count == 1 else f'{count} nodes'}: {reasons}{rest}"
    return Rejection(whole if len(whole) <= MAX_CHARACTERS else whole[: MAX_CHARACTERS - 4] + " ...")


def _may_have(gpu: GpuState, used: Amounts, request: PodRequest) -> bool:
    """Whether the GPU may have room for a container of the pod. True for a GPU with MIG devices, which are not examined."""
    wanted = (each.on(gpu.memory_mebibytes, gpu.scaling) for each in request.containers)
    return bool(gpu.mig) or any(gpu.has_room(used, each) for each in wanted)
