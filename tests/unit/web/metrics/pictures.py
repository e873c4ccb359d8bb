"""A small node for metrics and web pages: two A10s joined by NVLink, with given allocations."""

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry, gpu_name
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.devices import Gpu, GpuFailure, GpuSample, Level, NodeSample, NodeSnapshot, Topology
from gpumgr.placement.pods import PodKey
from tests.allocations import allocated

BLOCKS = 8


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def name_of(index: int) -> str:
    return gpu_name(uuid_of(index), ())


def snapshot_of(count: int, *, nvlinks: int = 0) -> NodeSnapshot:
    return NodeSnapshot(
        gpus=tuple(
            Gpu(
                index=index,
                uuid=uuid_of(index),
                minor=index,
                bus_id=f"0000:{index:02x}:00.0",
                model="NVIDIA A10",
                memory_bytes=BLOCKS * BLOCK_BYTES + 1,
                numa_node=index % 2,
            )
            for index in range(count)
        ),
        topology=Topology(
            tuple(tuple(Level.PSB if a == b else Level.PHB for b in range(count)) for a in range(count)),
            tuple(tuple(0 if a == b else nvlinks for b in range(count)) for a in range(count)),
        ),
        driver_version="550.54.15",
        nvml_version="12.550.54.15",
        cuda_version="12.4",
    )


def with_hole(snapshot: NodeSnapshot, *broken: int, named: bool = False) -> NodeSnapshot:
    """The GPUs of these indices can't be described; their rows are gone. `named`: their UUIDs are known from before."""
    kept = [row for row, gpu in enumerate(snapshot.gpus) if gpu.index not in broken]
    levels, nvlinks = snapshot.topology.levels, snapshot.topology.nvlinks
    return replace(
        snapshot,
        gpus=tuple(snapshot.gpus[row] for row in kept),
        topology=Topology(
            tuple(tuple(levels[a][b] for b in kept) for a in kept), tuple(tuple(nvlinks[a][b] for b in kept) for a in kept)
        ),
        failures=tuple(GpuFailure(index=n, uuid=uuid_of(n) if named else None, reason="GPU is lost") for n in broken),
    )


def allocation(
    letter: str,
    pod: PodKey | None,
    *,
    container: str | None = "main",
    init: bool = False,
    cores: Mapping[int, int] | None = None,
    blocks: Mapping[int, int] | None = None,
) -> Allocation:
    """`cores` and `blocks` map a GPU's index to a mask."""
    held = {name_of(index): mask for index, mask in (cores or {}).items()}
    return allocated(
        id=letter,
        pod=pod,
        uid=f"uid-{letter}",
        container=container,
        init=init,
        cores=held,
        blocks={name_of(index): mask for index, mask in (blocks or {}).items()},
        gpus=tuple(held),
        memory_blocks=BLOCKS,
        granted_at=float(ord(letter[0])),
        why="a test",
    )


def whole(letter: str, pod: PodKey, gpu: int) -> Allocation:
    return allocation(letter, pod, cores={gpu: ALL_CORES})


def view_of(
    *allocations: Allocation,
    count: int = 2,
    nvlinks: int = 0,
    shown: int | None = None,
    broken: Collection[int] = (),
    named: bool = False,
    known: Collection[int] | None = None,
    failed: Mapping[str, str] | None = None,
    cordoned: Mapping[str, str] | None = None,
    quarantine: Quarantine | None = None,
) -> AgentView:
    """`shown`: how many of the `count` GPUs that the node ever had the driver shows now, the first ones (None: all).

    `broken` and `named` as in `with_hole`; `known` are the GPUs that the ledger knows from before (None: all of `count`).
    """
    before = snapshot_of(count) if known is None else with_hole(snapshot_of(count), *(set(range(count)) - set(known)))
    gpu_registry = Inventory(snapshot=before).register(GpuRegistry())
    ledger = Ledger(gpu_registry)
    for one in allocations:
        ledger = ledger.occupy(one)
    inventory = Inventory(
        snapshot=with_hole(snapshot_of(count if shown is None else shown, nvlinks=nvlinks), *broken, named=named),
        health=HardwareHealth(failed=failed or {}, cordoned=cordoned or {}),
        quarantine=quarantine or Quarantine(),
    )
    return AgentView(ledger=ledger, inventory=inventory, node=inventory.view(gpu_registry))


def sample_of(*indices: int) -> NodeSample:
    return NodeSample(
        gpus={
            uuid_of(index): GpuSample(
                uuid=uuid_of(index),
                memory_used_bytes=1000 + index,
                memory_reserved_bytes=10,
                utilization_ratio=0.25,
                memory_copy_ratio=0.5,
                temperature_celsius=40.0,
                power_watts=71.5,
            )
            for index in indices
        }
    )
