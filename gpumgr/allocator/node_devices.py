"""What ListAndWatch says: a pure function of ledger and fitness.

* Every id of every card ever offered is in it, always (an id that vanishes while the kubelet allocates it crashes the kubelet).
* A failed GPU's ids are all Unhealthy. A GPU that must only take nothing new (quarantine, MIG, maintenance) keeps its used ids Healthy.
* Free memory blocks of a GPU that a container holds whole can be granted to nobody: they are Unhealthy, so that the scheduler does
  not count on them; but not before that container's own memory call has come or can't come any more (`open_ids`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpumgr.allocator.ids import RegisteredGpu, lowest
from gpumgr.allocator.ledger import AllocationId, Ledger
from gpumgr.units import BLOCK_MEBIBYTES, Amounts, GpuName


@dataclass(frozen=True)
class GpuDevices:
    """One card's Healthy ids, as masks; all other ids of it are Unhealthy. `numa_node` None = the kubelet is told none."""

    card: RegisteredGpu
    healthy_cores: int
    healthy_blocks: int
    numa_node: int | None = None


NodeDevices = tuple[GpuDevices, ...]


def node_devices(
    ledger: Ledger,
    *,
    failed: Collection[GpuName],
    cordoned: Collection[GpuName],
    numa_nodes: Mapping[GpuName, int],
    memory_blocks: Mapping[GpuName, int],
    open_ids: Collection[AllocationId] = (),
) -> NodeDevices:
    """`failed` GPUs do not work; `closed` ones work for those who are on them, but take nothing new.
    `memory_blocks` is what a GPU has now, which may be less than it was offered with (ECC was turned on)."""
    cores, blocks = ledger.held("core"), ledger.held("memory")
    result = []
    for card in ledger.gpu_registry.gpus:
        gpu, claimed = card.name, ledger.without_ids.get(card.name, Amounts())
        owner = ledger.exclusive.get(gpu)
        if gpu in failed:
            healthy = (0, 0)
        elif gpu in cordoned:
            healthy = (cores.get(gpu, 0), blocks.get(gpu, 0))
        elif owner is not None and owner.id not in open_ids:
            healthy = (card.all_ids("core"), blocks.get(gpu, 0))
        else:
            present = card.all_ids("memory") & (1 << memory_blocks.get(gpu, card.memory_blocks)) - 1
            healthy = (card.all_ids("core"), present | blocks.get(gpu, 0))
        if claimed != Amounts():
            claimed_blocks = -(-claimed.memory_mebibytes // BLOCK_MEBIBYTES)
            healthy = (_less(healthy[0], cores.get(gpu, 0), claimed.cores), _less(healthy[1], blocks.get(gpu, 0), claimed_blocks))
        result.append(GpuDevices(card, *healthy, numa_nodes.get(gpu)))
    return tuple(result)


def _less(healthy: int, held: int, claimed: int) -> int:
    """Healthy ids without so many free ones: claims hold these amounts."""
    free = healthy & ~held
    return healthy & held | lowest(free, max(0, free.bit_count() - claimed))
