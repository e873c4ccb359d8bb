"""A model of kube-scheduler with Dynamic Resource Allocation, which gives the first GPU of the node that fits.

kube-scheduler looks for fitting nodes until it has a share of all nodes (percentageOfNodesToScore: 50 - nodes / 125, at least 5 percent and
100 nodes), the next time from where it stopped. It scores these by CPU and RAM alone (NodeResourcesFit and
NodeResourcesBalancedAllocation with their default weights) and takes a random one of the best.
"""

from collections.abc import Callable
from typing import Final

from gpumgr.cluster.simulation.model import MAX_SHAPES, Cluster, Node, Placement, Shape
from gpumgr.cluster.simulation.randomness import Random

_NO_FIT: Final = -1


def least_allocated(node: Node, shape: Shape) -> int:
    return _score(node, shape, lambda used: 100 - used)


def most_allocated(node: Node, shape: Shape) -> int:
    return _score(node, shape, lambda used: used)


def _score(node: Node, shape: Shape, fit: Callable[[float], float]) -> int:
    spec = node.spec
    cpu = 1 - (node.cpu_milli - shape.cpu_milli) / max(1, spec.cpu_milli)
    ram = 1 - (node.ram_mebibytes - shape.ram_mebibytes) / max(1, spec.ram_mebibytes)
    return (int(fit(100 * cpu)) + int(fit(100 * ram))) // 2 + int((1 - abs(cpu - ram) / 2) * 100)


def sample_size(nodes: int) -> int:
    """The number of fitting nodes at which kube-scheduler stops."""
    return max(100, nodes * max(5, 50 - nodes // 125) // 100)


class DraPolicy:
    """`score` is 0 or more."""

    def __init__(self, cluster: Cluster, score: Callable[[Node, Shape], int], random: Random) -> None:
        self._cluster, self._score, self._random = cluster, score, random
        self._start = 0
        #: For each request the score of each node, and the number of changes that are part of it.
        self._known: dict[Shape, tuple[list[int], int]] = {}

    def find(self, shape: Shape) -> Placement | None:
        known, size = self._scores(shape), sample_size(len(self._cluster.nodes))
        order = [*range(self._start, len(known)), *range(self._start)]
        sample = [position for position in order if known[position] != _NO_FIT][:size]
        if len(sample) == size:
            self._start = (sample[-1] + 1) % len(known)
        if not sample:
            return None
        best = max(known[position] for position in sample)
        position = self._random.choice([each for each in sample if known[each] == best])
        node = self._cluster.nodes[position]
        return Placement(position, (node.sharable(shape)[0],) if shape.share else node.tightest(shape))

    def placed(self, uid: str, shape: Shape, where: Placement) -> None: ...
    def removed(self, uid: str) -> None: ...

    def _scores(self, shape: Shape) -> list[int]:
        nodes, changes = self._cluster.nodes, self._cluster.changes
        known, seen = self._known.pop(shape, ([_NO_FIT] * len(nodes), None))
        for position in range(len(nodes)) if seen is None else dict.fromkeys(changes[seen:]):
            node = nodes[position]
            known[position] = self._score(node, shape) if node.hosts(shape) else _NO_FIT
        self._known[shape] = (known, len(changes))
        if len(self._known) > MAX_SHAPES:
            del self._known[next(iter(self._known))]
        return known
