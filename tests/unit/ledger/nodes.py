"""Small nodes and pods for the allocator's tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpumgr.common.units import BLOCK_MEBIBYTES, GpuName, Resource
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.grant import grant
from gpumgr.ledger.ids import GpuRegistry, Masks
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.devices import Gpu, Level, Topology
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.placement.requests import ContainerKind, ReplicaRequest

#: The names of the first GPUs.
ONE, TWO, THREE, FOUR = (f"{index:08x}" for index in range(4))


def low(number: int) -> int:
    """The lowest ids of a GPU, so many."""
    return (1 << number) - 1


def cards_of(blocks: Sequence[int]) -> GpuRegistry:
    gpu_registry = GpuRegistry()
    for index, memory_blocks in enumerate(blocks):
        gpu_registry = gpu_registry.register(
            f"GPU-{index:08x}-0000-0000-0000-000000000000", memory_blocks * BLOCK_MEBIBYTES, replicas=10
        )
    return gpu_registry


def gpu_of(index: int = 0, **fields: Any) -> Gpu:
    """As the driver describes it."""
    described = {"uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000", "bus_id": None, "model": None, "memory_bytes": 80 << 30}
    return Gpu(index=index, minor=index, **{**described, **fields})


def topology_of(count: int, *, group: int = 2) -> Topology:
    """`group` GPUs under each PCIe switch, everything under one host bridge."""

    def level(a: int, b: int) -> Level:
        return Level.PIX if a // group == b // group else Level.PHB

    levels = tuple(tuple(Level.PSB if a == b else level(a, b) for b in range(count)) for a in range(count))
    return Topology(levels, tuple(tuple(0 for _ in range(count)) for _ in range(count)))


def node_of(
    gpu_registry: GpuRegistry,
    *,
    unschedulable: Mapping[str, str] | None = None,
    visible: Masks | None = None,
    lost: GpuName | None = None,
) -> NodeView:
    """`lost`: a GPU that the driver does not list."""
    return NodeView(
        topology=topology_of(len(gpu_registry.gpus)),
        rows={gpu.name: row for row, gpu in enumerate(gpu_registry.gpus) if gpu.name != lost},
        indices={gpu.name: index for index, gpu in enumerate(gpu_registry.gpus) if gpu.name != lost},
        unschedulable=unschedulable or {},
        visible_blocks=visible if visible is not None else {gpu.name: gpu.all_ids("memory") for gpu in gpu_registry.gpus},
    )


def empty(blocks: Sequence[int] = (16, 16, 16, 16)) -> Ledger:
    return Ledger(cards_of(blocks))


def ledger_of(*allocations: Allocation, blocks: Sequence[int] = (16, 16, 16, 16)) -> Ledger:
    """In this order; not checked."""
    return Ledger(cards_of(blocks), {each.id: each for each in allocations})


def pod(
    name: str, *containers: ContainerSpec, uid: str | None = None, phase: str = "Pending", created_at: float = 0.0
) -> PodView:
    return PodView(
        namespace="team", name=name, uid=uid or f"uid-{name}", phase=phase, created_at=created_at, containers=containers
    )


def app(cores: int, memory_blocks: int = 0, name: str = "main") -> ContainerSpec:
    return ContainerSpec(name=name, cores=cores, memory_blocks=memory_blocks)


def init(cores: int, memory_blocks: int = 0, name: str = "prepare") -> ContainerSpec:
    return ContainerSpec(name=name, kind="init", cores=cores, memory_blocks=memory_blocks)


def sidecar(cores: int, memory_blocks: int = 0, name: str = "side") -> ContainerSpec:
    return ContainerSpec(name=name, kind="sidecar", cores=cores, memory_blocks=memory_blocks)


def replicas(name: str = "main", kind: ContainerKind = "app", **request: Any) -> ContainerSpec:
    """A container of nvidia.com/gpu: one GPU by default."""
    return ContainerSpec(name=name, kind=kind, replicas=ReplicaRequest(**{"count": 1, **request}))


def caller(view: PodView, spec: ContainerSpec | None = None) -> Caller:
    """The pod's container, by default its first one."""
    return Caller(pod=view.key, view=view, spec=spec or view.containers[0])


def given(ledger: Ledger, who: Caller, kind: Resource, masks: Masks, **node: object) -> Ledger:
    """The ledger with the grant in it, checked."""
    view, granted = node_of(ledger.gpu_registry, **node), len(ledger.allocations)  # type: ignore[arg-type]
    return ledger.occupy(grant(view, ledger, who, kind, masks, new_id=f"a{granted}", now=float(granted), why="test")).check()
