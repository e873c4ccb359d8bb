"""Nodes and requests for tests of the scheduler."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection, explain
from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import GpuState, Naming, NodeState, Used
from gpumgr.cluster.core.quota import Quotas
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy, Shares, pod_request
from gpumgr.cluster.core.victims import Eviction, Preemptor, find_eviction
from gpumgr.common.units import Amounts
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


def used_on_first(node: NodeState, *held: tuple[int, int]) -> Used:
    """(cores, memory blocks) of the node's first GPUs; the others are free."""
    amounts = [Amounts(cores, 256 * blocks) for cores, blocks in held]
    return (*amounts, *[Amounts()] * (len(node.gpus) - len(held)))


def chosen(node: NodeState, wanted: PodRequest, *held: tuple[int, int], policy: Policy = "binpack") -> list[list[int]] | str:
    """The GPUs of each container, or why there is no room. `held` as for `used_on_first`."""
    found = choose(node, used_on_first(node, *held), wanted, policy)
    if isinstance(found, NodeChoice):
        return [[gpu for gpu, _ in shares] for shares in found.shares]
    return explain([(1, node.name, found)])


def misfit(node: NodeState, wanted: PodRequest, *held: tuple[int, int]) -> tuple[int, str, Misfit]:
    """For `explain`, of one node without room."""
    return 1, node.name, expect(Misfit, choose(node, used_on_first(node, *held), wanted, "binpack"))


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


def outgrow(index: ClusterIndex, count: int = 1100) -> None:
    """Adds and removes so many nodes that the index numbers its nodes again, at the next `compacting`."""
    for number in range(count):
        index.set_node(node_state(f"outgrown-{number}", 1))
    index.settle()
    for number in range(count):
        index.remove_node(f"outgrown-{number}")


#: Requests of all kinds: shares, whole GPUs, several containers, by HAMi's resources.
REQUESTS: tuple[PodRequest, ...] = (
    share(10, 4),
    share(30, 8),
    share(50, 40),
    share(60, 30),
    share(99, 60),
    share(50, 100),
    request(("app", 100, 0)),
    request(("app", 100, 70)),
    request(("app", 200, 0)),
    request(("app", 200, 100)),
    request(("app", 40, 8), ("app", 30, 8)),
    request(("init", 60, 16), ("app", 60, 8)),
    request(("init", 100, 0), ("app", 30, 8), ("app", 30, 8)),
    request(("init", 100, 0), ("app", 100, 0), ("app", 100, 0)),
    request(("init", 20, 8), ("sidecar", 20, 8), ("app", 200, 0)),
    request(("sidecar", 30, 8), ("app", 100, 0)),
    hami(cores=30, memory=3001),
    hami(memory=5000),
    hami(memory=9000),
    hami(cores=50, memory_percent=40, core_scaling=1.5, memory_scaling=2.0),
    hami(gpus=2, cores=10, memory=1000),
    hami(cores=100),
    together(hami("init", cores=60, memory=2000), hami(cores=20, memory=4000)),
    together(hami("sidecar", memory=500), hami("app", gpus=2, memory=1000)),
)
