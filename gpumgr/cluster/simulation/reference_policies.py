"""The reference policies, with which the scheduler's own are compared.

random, best-fit, dot-product, packing, clustering and fgd follow the published simulator of FGD (USENIX ATC '23): scores are integers from
0 to 100, computed from CPU and the sum of the free GPU-milli, which are relative to 128 CPUs and 8 GPUs. The class DraPolicy models
kube-scheduler with Dynamic Resource Allocation.
"""

from collections.abc import Callable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import exp
from typing import Final

from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.model import GPU_MILLI, MAX_SHAPES, Cluster, Gpus, Node, Placement, Random, Shape

_CPU_SCALE: Final = 128_000
_GPU_SCALE: Final = 8_000
_NO_FIT: Final = -1
#: The score of a node on which the request fits; the highest is the best.
Score = Callable[[Node, Shape], float]
#: The order of equal nodes, the lowest first: from the position of a node and the value of the node that was taken last.
Order = Callable[[int, float], float]
#: The GPUs of a node for a request that fits.
Choice = Callable[[Node, Shape], Gpus]


# -- policies that score nodes ---------------------------------------------------------------------------------------------------


class _Ranking:
    """The best node for one request under one score, computed again only for the nodes that changed since the last question."""

    def __init__(self, cluster: Cluster, shape: Shape, score: Score, order: Order) -> None:
        self._cluster, self._shape, self._score, self._order = cluster, shape, score, order
        self._last = 0.0
        self._seen = 0
        #: (-score, order, position, version of the node)
        self._heap: list[tuple[float, float, int, int]] = []
        self._fill()

    def best(self) -> int | None:
        """The position of the best node; None: the request fits nowhere."""
        changes, nodes = self._cluster.changes, self._cluster.nodes
        if len(changes) - self._seen + len(self._heap) > 4 * len(nodes) + 64:
            self._fill()
        elif self._seen < len(changes):
            for position in dict.fromkeys(changes[self._seen :]):
                if (entry := self._entry(position)) is not None:
                    heappush(self._heap, entry)
            self._seen = len(changes)
        heap = self._heap
        while heap and nodes[heap[0][2]].version != heap[0][3]:
            heappop(heap)
        if not heap:
            return None
        self._last = heap[0][1]
        return heap[0][2]

    def _fill(self) -> None:
        entries = map(self._entry, range(len(self._cluster.nodes)))
        self._heap = [entry for entry in entries if entry is not None]
        heapify(self._heap)
        self._seen = len(self._cluster.changes)

    def _entry(self, position: int) -> tuple[float, float, int, int] | None:
        node = self._cluster.nodes[position]
        if not node.hosts(self._shape):
            return None
        return -self._score(node, self._shape), self._order(position, self._last), position, node.version


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

    def _ranked(self, shape: Shape) -> _Ranking:
        return _Ranking(self._cluster, shape, self._score, self._order)


# -- scores of nodes ---------------------------------------------------------------------------------------------------------


def none(_node: Node, _shape: Shape) -> float:
    """All nodes are equal."""
    return 0


def best_fit(node: Node, shape: Shape) -> float:
    cpu = (node.cpu_milli - shape.cpu_milli) / _CPU_SCALE
    gpu = (node.free_milli - shape.total_milli) / _GPU_SCALE
    return int((1 - cpu / 2 - gpu / 2) * 100)


def dot_product(node: Node, shape: Shape) -> float:
    cpu = node.cpu_milli / _CPU_SCALE * shape.cpu_milli / _CPU_SCALE
    gpu = node.free_milli / _GPU_SCALE * shape.total_milli / _GPU_SCALE
    return int((1 - (cpu + gpu) / 2) * 100)


def clustering(node: Node, shape: Shape) -> float:
    """Prefers nodes that have pods of the same kind: these only, then among others, then no pods with GPUs, then other kinds."""
    if not shape.gpus:
        return 0
    kinds = {kind for kind, count in node.kinds.items() if count and kind != "none"}
    level = (3 if len(kinds) == 1 else 2) if shape.kind in kinds else (0 if kinds else 1)
    return 25 * level + 25 * (_GPU_SCALE - node.free_milli) // _GPU_SCALE


def packing(node: Node, shape: Shape) -> float:
    """Prefers shared GPUs, then idle GPUs of nodes in use, then idle nodes."""
    if not shape.gpus:
        return 0
    idle = len(node.idle_gpus())
    if idle == len(node.gpu_milli):
        return max(33 - idle, idle)
    taken = [node.gpu_milli[gpu] for gpu in node.tightest(shape)]
    fresh = taken.count(GPU_MILLI)
    return max(50 - fresh, 33) if fresh else max(100 - sum(each // 10 for each in taken) // 10, 50)


class Fgd:
    """The node, and for a share the GPU, on which fragmentation grows least."""

    def __init__(self, fragmentation: Fragmentation) -> None:
        self._fragmentation = fragmentation

    def score(self, node: Node, shape: Shape) -> float:
        return self._best(node, shape)[0]

    def choice(self, node: Node, shape: Shape) -> Gpus:
        return self._best(node, shape)[1]

    def _best(self, node: Node, shape: Shape) -> tuple[int, Gpus]:
        if not shape.share:
            gpus = node.tightest(shape)
            return self._scored(node, shape, gpus), gpus
        first: dict[int, int] = {}
        for gpu in node.sharable(shape):
            first.setdefault(node.gpu_milli[gpu], gpu)
        return max(
            ((self._scored(node, shape, (gpu,)), (gpu,)) for gpu in first.values()), key=lambda pair: (pair[0], -pair[1][0])
        )

    def _scored(self, node: Node, shape: Shape, gpus: Gpus) -> int:
        after = list(node.gpu_milli)
        for gpu in gpus:
            after[gpu] -= shape.gpu_milli
        less = self._fragmentation.of(node) - self._fragmentation.amount(node.spec.model, node.cpu_milli - shape.cpu_milli, after)
        return int(100 / (1 + exp(-less / 1000)))


# -- Dynamic Resource Allocation ---------------------------------------------------------------------------------------------


def least_allocated(node: Node, shape: Shape) -> int:
    return _allocation_score(node, shape, lambda used: 100 - used)


def most_allocated(node: Node, shape: Shape) -> int:
    return _allocation_score(node, shape, lambda used: used)


def _allocation_score(node: Node, shape: Shape, fit: Callable[[float], float]) -> int:
    spec = node.spec
    cpu = 1 - (node.cpu_milli - shape.cpu_milli) / max(1, spec.cpu_milli)
    ram = 1 - (node.ram_mebibytes - shape.ram_mebibytes) / max(1, spec.ram_mebibytes)
    return (int(fit(100 * cpu)) + int(fit(100 * ram))) // 2 + int((1 - abs(cpu - ram) / 2) * 100)


def sample_size(nodes: int) -> int:
    """The number of fitting nodes at which kube-scheduler stops."""
    return max(100, nodes * max(5, 50 - nodes // 125) // 100)


class DraPolicy:
    """kube-scheduler with Dynamic Resource Allocation, which gives the first GPU of the node that fits.

    kube-scheduler looks for fitting nodes until it has a share of all nodes (percentageOfNodesToScore: 50 - nodes / 125, at least 5 percent
    and 100 nodes), and continues there for the next pod. It scores these nodes by CPU and RAM alone (NodeResourcesFit and
    NodeResourcesBalancedAllocation with their default weights) and takes a random one of the best. `score` is 0 or more.
    """

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
