"""Small nodes and pods for the allocator's tests."""

from collections.abc import Mapping, Sequence

from gpumgr.common.units import BLOCK_MEBIBYTES
from gpumgr.ledger.ids import GpuRegistry, Masks
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.pods import ContainerSpec, PodView


def cards_of(blocks: Sequence[int]) -> GpuRegistry:
    gpu_registry = GpuRegistry()
    for index, memory_blocks in enumerate(blocks):
        gpu_registry = gpu_registry.register(
            f"GPU-{index:08x}-0000-0000-0000-000000000000", memory_blocks * BLOCK_MEBIBYTES, replicas=10
        )
    return gpu_registry


def topology_of(count: int, *, group: int = 2) -> Topology:
    """`group` GPUs under each PCIe switch, everything under one host bridge."""

    def level(a: int, b: int) -> Level:
        return Level.PIX if a // group == b // group else Level.PHB

    levels = tuple(tuple(Level.PSB if a == b else level(a, b) for b in range(count)) for a in range(count))
    return Topology(levels, tuple(tuple(0 for _ in range(count)) for _ in range(count)))


def node_of(
    gpu_registry: GpuRegistry, *, unschedulable: Mapping[str, str] | None = None, visible: Masks | None = None
) -> NodeView:
    return NodeView(
        topology=topology_of(len(gpu_registry.gpus)),
        rows={gpu.name: row for row, gpu in enumerate(gpu_registry.gpus)},
        indices={gpu.name: index for index, gpu in enumerate(gpu_registry.gpus)},
        unschedulable=unschedulable or {},
        visible_blocks=visible if visible is not None else {gpu.name: gpu.all_ids("memory") for gpu in gpu_registry.gpus},
    )


def empty(blocks: Sequence[int] = (16, 16, 16, 16)) -> Ledger:
    return Ledger(cards_of(blocks))


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
