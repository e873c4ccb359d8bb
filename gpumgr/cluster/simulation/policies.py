"""The policies by name. A policy chooses the node and the GPUs of a pod.

random, best-fit, dot-product, packing, clustering and fgd follow the published simulator of FGD (USENIX ATC '23). Their scores are
integers, 0 to 100 on nodes up to 128 CPUs and 8 GPUs.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from math import exp
from operator import or_
from typing import Any, Final, Self

from msgspec.structs import replace

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import NodeState, node_of_equal_gpus
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import ContainerRequest, PlacedPod, PodRequest, Policy
from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.model import GPU_MILLI, MAX_SHAPES, Change, Cluster, Gpus, Node, NodeSpec, Placement, Random, Shape
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts

_CPU_SCALE: Final = 128_000
_GPU_SCALE: Final = 8_000
#: Where a pod with this request goes; None: it fits nowhere.
Find = Callable[[Shape], Placement | None]
#: The score of a node on which the request fits; the highest is the best.
Score = Callable[[Node, Shape], float]
#: The GPUs of a node for a request that fits.
Choice = Callable[[Node, Shape], Gpus]
#: (score and position of a node) -> its sort key among the nodes on which a request fits: an integer, or a tuple.
_MakeKey = Callable[[float, int], Any]


# -- policies that compare all nodes -------------------------------------------------------------------------------------------


class _Fitting:
    """The nodes on which one request fits. `update` computes only the nodes that have changed. `scores`: the score of each node; None: the
    request does not fit. `ordered`: the sorted keys of the nodes on which the request fits."""

    def __init__(self, cluster: Cluster, shape: Shape, score: Score, key: _MakeKey) -> None:
        self._cluster, self._shape, self._score, self._key = cluster, shape, score, key
        self.scores = list(map(self._scored, cluster.nodes))
        self.ordered = sorted(key(each, position) for position, each in enumerate(self.scores) if each is not None)
        self._seen = len(cluster.changes)

    def update(self) -> Self:
        for position in self._cluster.changed(self._seen):
            before, after = self.scores[position], self._scored(self._cluster.nodes[position])
            if before == after:
                continue
            self.scores[position] = after
            old, new = (None if score is None else self._key(score, position) for score in (before, after))
            if old == new:
                continue
            if old is not None:
                del self.ordered[bisect_left(self.ordered, old)]
            if new is not None:
                insort(self.ordered, new)
        self._seen = len(self._cluster.changes)
        return self

    def _scored(self, node: Node) -> float | None:
        return self._score(node, self._shape) if node.hosts(self._shape) else None


def _fitting(cluster: Cluster, score: Score, key: _MakeKey) -> Callable[[Shape], _Fitting]:
    known = lru_cache(MAX_SHAPES)(lambda shape: _Fitting(cluster, shape, score, key))
    return lambda shape: known(shape).update()


def score_policy(cluster: Cluster, score: Score, choice: Choice, order: Sequence[float]) -> Find:
    """Takes the node with the highest score. `order`: position of a node -> a number; among equal scores the lowest number wins."""
    fitting = _fitting(cluster, score, lambda score, position: (-score, order[position], position))

    def find(shape: Shape) -> Placement | None:
        if not (ordered := fitting(shape).ordered):
            return None
        position = ordered[0][-1]
        return Placement(position, choice(cluster.nodes[position], shape))

    return find


# -- scores of nodes ---------------------------------------------------------------------------------------------------------


def best_fit(node: Node, shape: Shape) -> float:
    cpu = (node.cpu_milli - shape.cpu_milli) / _CPU_SCALE
    gpu = (node.free_milli - shape.total_milli) / _GPU_SCALE
    return int((1 - cpu / 2 - gpu / 2) * 100)


def dot_product(node: Node, shape: Shape) -> float:
    cpu = node.cpu_milli / _CPU_SCALE * shape.cpu_milli / _CPU_SCALE
    gpu = node.free_milli / _GPU_SCALE * shape.total_milli / _GPU_SCALE
    return int((1 - (cpu + gpu) / 2) * 100)


def clustering(node: Node, shape: Shape) -> float:
    """Prefers, in this order: nodes with pods of only the request's kind; nodes with pods of this and other kinds; nodes without pods with
    GPUs; nodes with pods of only other kinds."""
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


def fgd(fragmentation: Fragmentation) -> tuple[Score, Choice]:
    """The node, and for a share the GPU, on which fragmentation grows least."""

    def scored(node: Node, shape: Shape, gpus: Gpus) -> int:
        after = list(node.gpu_milli)
        for gpu in gpus:
            after[gpu] -= shape.gpu_milli
        less = fragmentation.of(node) - fragmentation.amount(node.spec.model, node.cpu_milli - shape.cpu_milli, after)
        return int(100 / (1 + exp(-less / 1000)))

    def best(node: Node, shape: Shape) -> tuple[int, Gpus]:
        if not shape.share:
            gpus = node.tightest(shape)
            return scored(node, shape, gpus), gpus
        first: dict[int, int] = {}
        for gpu in node.sharable(shape):
            first.setdefault(node.gpu_milli[gpu], gpu)
        return max(((scored(node, shape, (gpu,)), (gpu,)) for gpu in first.values()), key=lambda pair: (pair[0], -pair[1][0]))

    return lambda node, shape: best(node, shape)[0], lambda node, shape: best(node, shape)[1]


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
    """The number of fitting nodes at which kube-scheduler stops if percentageOfNodesToScore is not set."""
    return max(100, nodes * max(5, 50 - nodes // 125) // 100)


def random_policy(cluster: Cluster, random: Random) -> Find:
    """A random node on which the request fits, and for a share a random one of its GPUs with room."""
    fitting = _fitting(cluster, lambda _node, _shape: 0, lambda _score, position: position)

    def find(shape: Shape) -> Placement | None:
        if not (positions := fitting(shape).ordered):
            return None
        position = random.choice(positions)
        node = cluster.nodes[position]
        return Placement(position, (random.choice(node.sharable(shape)),) if shape.share else node.tightest(shape))

    return find


def dra_policy(cluster: Cluster, random: Random, score: Score) -> Find:
    """kube-scheduler with Dynamic Resource Allocation, which gives the pod the node's first GPU with room.

    kube-scheduler samples `sample_size` fitting nodes, and begins the next sample after the last of them. It scores them by CPU and RAM
    alone (NodeResourcesFit and NodeResourcesBalancedAllocation with their default weights), and takes a random one of the best.
    """
    fitting = _fitting(cluster, score, lambda _score, position: position)
    start, size = 0, sample_size(len(cluster.nodes))

    def find(shape: Shape) -> Placement | None:
        nonlocal start
        found = fitting(shape)
        first = bisect_left(found.ordered, start)
        sample = (found.ordered[first:] + found.ordered[:first])[:size]
        if not sample:
            return None
        if len(sample) == size:
            start = (sample[-1] + 1) % len(cluster.nodes)
        best = max(found.scores[each] or 0 for each in sample)
        position = random.choice([each for each in sample if found.scores[each] == best])
        node = cluster.nodes[position]
        return Placement(position, (node.sharable(shape)[0],) if shape.share else node.tightest(shape))

    return find


# -- the scheduler's own policies --------------------------------------------------------------------------------------------


@lru_cache(MAX_SHAPES)
def request_of(shape: Shape) -> PodRequest:
    """A pod with one container. Cores are rounded up."""
    if not shape.gpus:
        return PodRequest(cpu_milli=shape.cpu_milli)
    container = ContainerRequest(
        gpus=shape.gpus,
        cores_per_gpu=-(-shape.gpu_milli * CORES_PER_GPU // GPU_MILLI),
        memory_mebibytes=shape.memory_blocks * BLOCK_MEBIBYTES,
    )
    return PodRequest((container,), shape.constraints, shape.cpu_milli)


def state_of(spec: NodeSpec) -> NodeState:
    """The GPUs are equally far from each other."""
    if not spec.gpus:
        return NodeState(name=spec.name, cpu_milli=spec.cpu_milli)
    even = node_of_equal_gpus(spec.name, spec.gpus * CORES_PER_GPU, spec.gpus * spec.memory_blocks * BLOCK_MEBIBYTES)
    return replace(even, gpus=tuple(replace(gpu, model=spec.model) for gpu in even.gpus), cpu_milli=spec.cpu_milli)


class _Offered:
    """The nodes with enough CPU and RAM for a request. `bits`: position of a node -> the set of only that node."""

    def __init__(self, cluster: Cluster, bits: Sequence[int], cpu_milli: int, ram_mebibytes: int) -> None:
        self._cluster, self._bits, self._cpu_milli, self._ram_mebibytes = cluster, bits, cpu_milli, ram_mebibytes
        self._nodes = reduce(or_, (bit for position, bit in enumerate(bits) if self._has_room(position)), 0)
        self._seen = len(cluster.changes)

    def nodes(self) -> int:
        for position in self._cluster.changed(self._seen):
            bit = self._bits[position]
            self._nodes = self._nodes | bit if self._has_room(position) else self._nodes & ~bit
        self._seen = len(self._cluster.changes)
        return self._nodes

    def _has_room(self, position: int) -> bool:
        node = self._cluster.nodes[position]
        return node.cpu_milli >= self._cpu_milli and node.ram_mebibytes >= self._ram_mebibytes


def core_policy(cluster: Cluster, policy: Policy, cpu_per_gpu_milli: int) -> Find:
    """A policy of `gpumgr scheduler`, computed by a ClusterIndex. CPU and RAM are checked here instead of by kube-scheduler."""
    index = ClusterIndex(cpu_per_gpu_milli=cpu_per_gpu_milli)
    positions = {node.spec.name: position for position, node in enumerate(cluster.nodes)}
    for node in cluster.nodes:
        index.set_node(state_of(node.spec))
    bits = [index.node_set([name]) for name in positions]
    offered = lru_cache(MAX_SHAPES)(lambda cpu_milli, ram_mebibytes: _Offered(cluster, bits, cpu_milli, ram_mebibytes))
    questions = lru_cache(MAX_SHAPES)(lambda request: Question(index, request, policy))
    seen = 0

    def find(shape: Shape) -> Placement | None:
        nonlocal seen
        for change in cluster.changes[seen:]:
            if change.sign < 0:
                index.bind(placed_pod(change, cluster.nodes[change.where.node].spec))
            else:
                index.remove(str(change.pod))
        seen = len(cluster.changes)
        found = questions(request_of(shape)).best(offered(shape.cpu_milli, shape.ram_mebibytes).nodes())
        if not found:
            return None
        _, name, choice = found[0]
        return Placement(positions[name], tuple(gpu for shares in choice.shares for gpu, _ in shares))

    return find


def placed_pod(change: Change, node: NodeSpec) -> PlacedPod:
    shape, request = change.shape, request_of(change.shape)
    memory = shape.memory_blocks if shape.share else node.memory_blocks
    shares = tuple(
        tuple((gpu, Amounts(container.cores_per_gpu, memory * BLOCK_MEBIBYTES)) for gpu in change.where.gpus)
        for container in request.containers
    )
    return PlacedPod(uid=str(change.pod), node=node.name, request=request, shares=shares)


_SCORES: Final[Mapping[str, Score]] = {
    "best-fit": best_fit,
    "dot-product": dot_product,
    "packing": packing,
    "clustering": clustering,
}
_DRA: Final[Mapping[str, Score]] = {"dra": least_allocated, "dra-most-allocated": most_allocated}
#: "topology" is left out: with GPUs that are equally far from each other it decides as "binpack" does.
POLICIES: Final = ("least-fragmentation", "binpack", "spread", "random", *_SCORES, "fgd", *_DRA)


def make_policy(policy: str, cluster: Cluster, cpu_per_gpu_milli: int, fragmentation: Fragmentation, random: Random) -> Find:
    """Makes one of POLICIES. `cpu_per_gpu_milli`: the CPU that an average pod requests beside one GPU, in thousandths. Only "fgd" uses
    `fragmentation`."""
    match policy:
        case "least-fragmentation" | "binpack" | "spread":
            return core_policy(cluster, policy, cpu_per_gpu_milli)
        case "random":
            return random_policy(cluster, random)
        case "dra" | "dra-most-allocated":
            return dra_policy(cluster, random, _DRA[policy])
    score, choice = fgd(fragmentation) if policy == "fgd" else (_SCORES[policy], Node.tightest)
    # The order among equal scores is random, because files list equal nodes side by side: in the file's order they would be filled one
    # after another.
    return score_policy(cluster, score, choice, [random.random() for _ in cluster.nodes])
