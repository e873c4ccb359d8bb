"""The policies by name. Each one decides where a pod goes; the GPUs of the node are part of the decision."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, Protocol, get_args

from gpumgr.cluster.core.request import Policy
from gpumgr.cluster.simulation import scores
from gpumgr.cluster.simulation.core_policy import CorePolicy
from gpumgr.cluster.simulation.dra import DraPolicy, least_allocated, most_allocated
from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.model import MAX_SHAPES, Cluster, Gpus, Node, Placement, Shape
from gpumgr.cluster.simulation.randomness import Random
from gpumgr.cluster.simulation.ranking import Order, Ranking, Score
from gpumgr.cluster.simulation.scores import Choice


class Placer(Protocol):
    """Decides for one cluster. It is informed of what was placed and what has ended."""

    def find(self, shape: Shape) -> Placement | None: ...
    def placed(self, uid: str, shape: Shape, where: Placement) -> None: ...
    def removed(self, uid: str) -> None: ...


class ScorePolicy:
    """The node with the highest score, then the GPUs on it."""

    def __init__(self, cluster: Cluster, score: Score, choice: Choice, order: Order) -> None:
        self._cluster, self._score, self._choice, self._order = cluster, score, choice, order
        self._ranking = lru_cache(MAX_SHAPES)(self._ranked)

    def find(self, shape: Shape) -> Placement | None:
        best = self._ranking(shape).best()
        return None if best is None else Placement(best, self._choice(self._cluster.nodes[best], shape))

    def placed(self, uid: str, shape: Shape, where: Placement) -> None: ...
    def removed(self, uid: str) -> None: ...

    def _ranked(self, shape: Shape) -> Ranking:
        return Ranking(self._cluster, shape, self._score, self._order)


#: From the cluster, thousandths of a CPU that an average pod requests beside one GPU, the fragmentation by typical requests, and a source
#: of random numbers.
_Make = Callable[[Cluster, int, Fragmentation, Random], Placer]


def _fixed(cluster: Cluster, random: Random) -> Order:
    """One random order of the nodes for all decisions. The published simulator takes the first of equal nodes, in an order that is not
    that of the file. Results that depend on the file's order would not be comparable, because files list equal nodes side by side."""
    keys = [random.random() for _ in cluster.nodes]
    return lambda position, _last: keys[position]


def _scored(score: Score) -> _Make:
    return lambda cluster, _cpu_per_gpu_milli, _fragmentation, random: ScorePolicy(
        cluster, score, Node.tightest, _fixed(cluster, random)
    )


def _random(cluster: Cluster, _cpu_per_gpu_milli: int, _fragmentation: Fragmentation, random: Random) -> Placer:
    def any_gpu(node: Node, shape: Shape) -> Gpus:
        return (random.choice(node.sharable(shape)),) if shape.share else node.tightest(shape)

    # Each node that is scored gets a time that is exponentially distributed and begins with that of the last node that was taken. The
    # distribution has no memory, so the earliest node is each one with equal probability.
    return ScorePolicy(cluster, scores.none, any_gpu, lambda _position, last: last + random.expovariate(1.0))


def _fgd(cluster: Cluster, _cpu_per_gpu_milli: int, fragmentation: Fragmentation, random: Random) -> Placer:
    rule = scores.Fgd(fragmentation)
    return ScorePolicy(cluster, rule.score, rule.choice, _fixed(cluster, random))


def _core(policy: Policy) -> _Make:
    return lambda cluster, cpu_per_gpu_milli, _fragmentation, _random: CorePolicy(cluster, policy, cpu_per_gpu_milli)


POLICIES: Final[Mapping[str, _Make]] = {
    **{policy: _core(policy) for policy in get_args(Policy)},
    "random": _random,
    "best-fit": _scored(scores.best_fit),
    "dot-product": _scored(scores.dot_product),
    "packing": _scored(scores.packing),
    "clustering": _scored(scores.clustering),
    "fgd": _fgd,
    "dra": lambda cluster, _cpu_per_gpu_milli, _fragmentation, random: DraPolicy(cluster, least_allocated, random),
    "dra-most-allocated": lambda cluster, _cpu_per_gpu_milli, _fragmentation, random: DraPolicy(cluster, most_allocated, random),
}
