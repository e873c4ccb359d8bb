"""The policies by name. A policy decides where a pod goes; the GPUs of the node are part of the decision."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import Final, Protocol

from gpumgr.cluster.core.index import ClusterIndex, NodeSet, PlacedPod
from gpumgr.cluster.core.node import GpuState, NodeState, homogeneous
from gpumgr.cluster.core.request import ContainerRequest, PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection
from gpumgr.cluster.simulation import reference_policies as reference
from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.model import GPU_MILLI, MAX_SHAPES, Cluster, Gpus, Node, NodeSpec, Placement, Random, Shape
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts
from gpumgr.placement.evaluators.constraints import Constraints


class Placer(Protocol):
    """A policy that decides for one cluster. It is informed of what was placed and what has ended."""

    def find(self, shape: Shape) -> Placement | None: ...
    def placed(self, uid: str, shape: Shape, where: Placement) -> None: ...
    def removed(self, uid: str) -> None: ...


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
    constraints = Constraints(use_models=shape.use_models, avoid_models=shape.avoid_models)
    return PodRequest((container,), constraints, shape.cpu_milli)


def state_of(spec: NodeSpec) -> NodeState:
    """Makes the state of a node. Its GPUs are equally far from each other."""
    if not spec.gpus:
        return NodeState(name=spec.name, cpu_milli=spec.cpu_milli)
    even = homogeneous(spec.name, spec.gpus * CORES_PER_GPU, spec.gpus * spec.memory_blocks * BLOCK_MEBIBYTES)
    gpu = GpuState(memory_mebibytes=spec.memory_blocks * BLOCK_MEBIBYTES, model=spec.model)
    return NodeState(name=spec.name, gpus=(gpu,) * spec.gpus, topology=even.topology, naming="index", cpu_milli=spec.cpu_milli)


class _Offered:
    """The nodes with enough CPU and RAM for a request. `bits`: position -> the set of only that node."""

    def __init__(self, cluster: Cluster, bits: Sequence[NodeSet], cpu_milli: int, ram_mebibytes: int) -> None:
        self._cluster, self._bits, self._cpu_milli, self._ram_mebibytes = cluster, bits, cpu_milli, ram_mebibytes
        there = (bits[position].nodes for position in range(len(bits)) if self._has_room(position))
        self._nodes = replace(bits[0], nodes=reduce(or_, there, 0))
        self._seen = len(cluster.changes)

    def nodes(self) -> NodeSet:
        changes, nodes = self._cluster.changes, self._nodes.nodes
        for position in dict.fromkeys(changes[self._seen :]):
            bit = self._bits[position].nodes
            nodes = nodes | bit if self._has_room(position) else nodes & ~bit
        self._seen, self._nodes = len(changes), replace(self._nodes, nodes=nodes)
        return self._nodes

    def _has_room(self, position: int) -> bool:
        node = self._cluster.nodes[position]
        return node.cpu_milli >= self._cpu_milli and node.ram_mebibytes >= self._ram_mebibytes


class CorePolicy:
    """A policy of `gpumgr scheduler`, computed by its own index. CPU and RAM are checked here; in a cluster, kube-scheduler checks them."""

    def __init__(self, cluster: Cluster, policy: Policy, cpu_per_gpu_milli: int) -> None:
        self._cluster, self._policy = cluster, policy
        self._index = ClusterIndex(cpu_per_gpu_milli=cpu_per_gpu_milli)
        self._positions = {node.spec.name: position for position, node in enumerate(cluster.nodes)}
        for node in cluster.nodes:
            self._index.set_node(state_of(node.spec))
        bits = [self._index.node_set([node.spec.name]) for node in cluster.nodes]
        self._offered = lru_cache(MAX_SHAPES)(lambda cpu_milli, ram_mebibytes: _Offered(cluster, bits, cpu_milli, ram_mebibytes))
        self._questions = lru_cache(MAX_SHAPES)(lambda request: self._index.shape(request, policy, keep=True))

    def find(self, shape: Shape) -> Placement | None:
        nodes = self._offered(shape.cpu_milli, shape.ram_mebibytes).nodes()
        request = request_of(shape)
        found = self._index.rank(request, self._policy, nodes, shape=self._questions(request)) if len(nodes) else None
        if found is None or isinstance(found, Rejection):
            return None
        name, choice = found[0]
        return Placement(self._positions[name], tuple(gpu for shares in choice.shares for gpu, _ in shares))

    def placed(self, uid: str, shape: Shape, where: Placement) -> None:
        if not shape.gpus:
            self._index.use_cpu(uid, self._cluster.nodes[where.node].spec.name, shape.cpu_milli)
            return
        spec, request = self._cluster.nodes[where.node].spec, request_of(shape)
        memory = shape.memory_blocks if shape.share else spec.memory_blocks
        amounts = Amounts(request.containers[0].cores_per_gpu, memory * BLOCK_MEBIBYTES)
        shares = (tuple((gpu, amounts) for gpu in where.gpus),)
        self._index.bind(PlacedPod(uid=uid, node=spec.name, request=request, shares=shares))

    def removed(self, uid: str) -> None:
        self._index.free_cpu(uid)
        self._index.remove(uid)


#: Makes a policy. The arguments are the cluster, the CPU (in thousandths) that an average pod requests beside one GPU, the fragmentation
#: by typical requests, and a source of random numbers.
_Make = Callable[[Cluster, int, Fragmentation, Random], Placer]


def _fixed(cluster: Cluster, random: Random) -> reference.Order:
    """Gives the nodes one random order for all decisions. The published simulator takes the first of equal nodes, and its order differs
    from the order of the file. Results that depend on the file's order would not be comparable, because files list equal nodes side by
    side."""
    keys = [random.random() for _ in cluster.nodes]
    return lambda position, _last: keys[position]


def _scored(score: reference.Score) -> _Make:
    return lambda cluster, _cpu_per_gpu_milli, _fragmentation, random: reference.ScorePolicy(
        cluster, score, Node.tightest, _fixed(cluster, random)
    )


def _random(cluster: Cluster, _cpu_per_gpu_milli: int, _fragmentation: Fragmentation, random: Random) -> Placer:
    def any_gpu(node: Node, shape: Shape) -> Gpus:
        return (random.choice(node.sharable(shape)),) if shape.share else node.tightest(shape)

    # The time of a scored node is the time of the last chosen node plus an exponentially distributed time. That distribution has no
    # memory, so each node is the earliest with equal probability.
    return reference.ScorePolicy(cluster, reference.none, any_gpu, lambda _position, last: last + random.expovariate(1.0))


def _fgd(cluster: Cluster, _cpu_per_gpu_milli: int, fragmentation: Fragmentation, random: Random) -> Placer:
    rule = reference.Fgd(fragmentation)
    return reference.ScorePolicy(cluster, rule.score, rule.choice, _fixed(cluster, random))


def _core(policy: Policy) -> _Make:
    return lambda cluster, cpu_per_gpu_milli, _fragmentation, _random: CorePolicy(cluster, policy, cpu_per_gpu_milli)


def _dra(score: Callable[[Node, Shape], int]) -> _Make:
    return lambda cluster, _cpu_per_gpu_milli, _fragmentation, random: reference.DraPolicy(cluster, score, random)


#: The scheduler's policy "topology" is left out: the GPUs here are equally far from each other, so it decides as "binpack" does.
POLICIES: Final[Mapping[str, _Make]] = {
    "least-fragmentation": _core("least-fragmentation"),
    "binpack": _core("binpack"),
    "spread": _core("spread"),
    "random": _random,
    "best-fit": _scored(reference.best_fit),
    "dot-product": _scored(reference.dot_product),
    "packing": _scored(reference.packing),
    "clustering": _scored(reference.clustering),
    "fgd": _fgd,
    "dra": _dra(reference.least_allocated),
    "dra-most-allocated": _dra(reference.most_allocated),
}
