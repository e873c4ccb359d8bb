"""The policies of `gpumgr scheduler`, computed by its own index. CPU and RAM are checked here: in a cluster, kube-scheduler does it."""

from functools import lru_cache

from gpumgr.cluster.core.index import ClusterIndex, PlacedPod
from gpumgr.cluster.core.node import GpuState, NodeState, homogeneous
from gpumgr.cluster.core.request import ContainerRequest, PodRequest, Policy
from gpumgr.cluster.core.shape import Rejection
from gpumgr.cluster.simulation.model import GPU_MILLI, MAX_SHAPES, Cluster, NodeSpec, Placement, Shape
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts
from gpumgr.placement.evaluators.constraints import Constraints


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
    """GPUs that are equally far from each other."""
    if not spec.gpus:
        return NodeState(name=spec.name, cpu_milli=spec.cpu_milli)
    even = homogeneous(spec.name, spec.gpus * CORES_PER_GPU, spec.gpus * spec.memory_blocks * BLOCK_MEBIBYTES)
    gpu = GpuState(memory_mebibytes=spec.memory_blocks * BLOCK_MEBIBYTES, model=spec.model)
    return NodeState(name=spec.name, gpus=(gpu,) * spec.gpus, topology=even.topology, naming="index", cpu_milli=spec.cpu_milli)


class _Offered:
    """Names of the nodes with enough CPU and RAM for a request."""

    def __init__(self, cluster: Cluster, cpu_milli: int, ram_mebibytes: int) -> None:
        self._cluster, self._cpu_milli, self._ram_mebibytes = cluster, cpu_milli, ram_mebibytes
        self._names = {node.spec.name for position, node in enumerate(cluster.nodes) if self._has_room(position)}
        self._frozen: frozenset[str] | None = None
        self._seen = len(cluster.changes)

    def names(self) -> frozenset[str]:
        """The same object as before if the names are the same."""
        changes = self._cluster.changes
        for position in dict.fromkeys(changes[self._seen :]):
            name, room = self._cluster.nodes[position].spec.name, self._has_room(position)
            if room != (name in self._names):
                self._names ^= {name}
                self._frozen = None
        self._seen = len(changes)
        if self._frozen is None:
            self._frozen = frozenset(self._names)
        return self._frozen

    def _has_room(self, position: int) -> bool:
        node = self._cluster.nodes[position]
        return node.cpu_milli >= self._cpu_milli and node.ram_mebibytes >= self._ram_mebibytes


class CorePolicy:
    """A policy of the scheduler."""

    def __init__(self, cluster: Cluster, policy: Policy, cpu_per_gpu_milli: int) -> None:
        self._cluster, self._policy = cluster, policy
        self._index = ClusterIndex(cpu_per_gpu_milli=cpu_per_gpu_milli)
        self._positions = {node.spec.name: position for position, node in enumerate(cluster.nodes)}
        self._offered = lru_cache(MAX_SHAPES)(lambda cpu_milli, ram_mebibytes: _Offered(cluster, cpu_milli, ram_mebibytes))
        for node in cluster.nodes:
            self._index.set_node(state_of(node.spec))

    def find(self, shape: Shape) -> Placement | None:
        names = self._offered(shape.cpu_milli, shape.ram_mebibytes).names()
        found = self._index.rank(request_of(shape), self._policy, names) if names else Rejection("no node has enough CPU and RAM")
        if isinstance(found, Rejection):
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
