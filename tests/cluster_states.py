"""Nodes and requests for tests of the scheduler."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from gpumgr.cluster.core.choose import choose
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import GpuState, Naming, NodeState
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Shares, pod_request
from gpumgr.cluster.core.victims import Eviction, Preemptor, find_eviction
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import Constraints, ContainerKind, ReplicaRequest
from tests.mig_profiles import H100
from tests.topologies import topology_from_matrix

GPU_MEBIBYTES = 16384
T = TypeVar("T")


def expect(kind: type[T], value: object) -> T:
    """The value, which must be of this type."""
    assert isinstance(value, kind), value
    return value


def fits(found: list[T] | Rejection) -> list[T]:
    """What a question to the index has found."""
    return expect(list, found)


def node_state(
    name: str,
    count: int,
    *,
    near: tuple[tuple[int, int], ...] = (),
    unhealthy: tuple[int, ...] = (),
    cordoned: tuple[int, ...] = (),
    models: Sequence[str] = (),
    numa: Sequence[int] = (),
    naming: Naming = "uuid",
    reported_shares: Mapping[str, Shares] | None = None,
) -> NodeState:
    """`count` GPUs of 64 blocks. The pairs in `near` are joined by NVLinks, all others across the sockets. `models` and `numa` have an
    entry for each GPU, if they are given."""
    pairs = {pair for a, b in near for pair in ((a, b), (b, a))}
    rows = [["X" if a == b else "NV4" if (a, b) in pairs else "SYS" for b in range(count)] for a in range(count)]
    return NodeState(
        name=name,
        gpus=tuple(
            GpuState(
                uuid=f"GPU-{name}-{number}",
                model=models[number] if models else "",
                numa=numa[number] if numa else -1,
                memory_mebibytes=GPU_MEBIBYTES,
                healthy=number not in unhealthy,
                cordoned=number in cordoned,
            )
            for number in range(count)
        ),
        topology=topology_from_matrix(rows),
        naming=naming,
        reported_shares=reported_shares or {},
    )


def index_of(*nodes: NodeState, quotas: Quotas | None = None) -> ClusterIndex:
    index = ClusterIndex(quotas)
    for node in nodes:
        index.set_node(node)
    return index


def request(*containers: tuple[ContainerKind, int, int]) -> PodRequest:
    """From (kind, cores, memory blocks) of each container."""
    return pod_request(
        ContainerSpec(name=f"c{place}", kind=kind, cores=cores, memory_blocks=blocks)
        for place, (kind, cores, blocks) in enumerate(containers)
    )


def share(cores: int, blocks: int) -> PodRequest:
    return request(("app", cores, blocks))


def constrained(wanted: PodRequest, **constraints: Any) -> PodRequest:
    return PodRequest(wanted.containers, Constraints(**constraints))


def hami(kind: ContainerKind = "app", gpus: int = 1, cores: int = 0, memory: int | None = None, **more: Any) -> PodRequest:
    """One container with HAMi's resources; `memory` in MiB of each GPU."""
    wanted = ReplicaRequest(count=gpus, cores=cores, memory_mebibytes=memory, **more)
    return pod_request([ContainerSpec(name="main", kind=kind, replicas=wanted)])


def together(*pods: PodRequest) -> PodRequest:
    """One pod with the containers of all."""
    return PodRequest(tuple(container for pod in pods for container in pod.containers))


def with_replicas(node: NodeState, replicas: int) -> NodeState:
    return replace(node, gpus=tuple(replace(gpu, replicas=replicas) for gpu in node.gpus))


def with_mig(node: NodeState, *positions: int) -> NodeState:
    """These GPUs (without positions: all) are H100s with dynamic MIG."""
    made = [
        replace(gpu, mig=H100, replicas=7, memory_mebibytes=81408) if not positions or position in positions else gpu
        for position, gpu in enumerate(node.gpus)
    ]
    return replace(node, gpus=tuple(made))


def evict(
    pods: Iterable[PlacedPod], wanted: PodRequest, node: NodeState, *, priority: int = 10, **more: frozenset[str]
) -> Eviction | None:
    """For a pod that has no quota."""
    preemptor = Preemptor(wanted, priority, lambda used, _: choose(node, used, wanted, "binpack"))
    return find_eviction(node, {pod.uid: pod for pod in pods}, preemptor, **more)
