"""The content of ListAndWatch: a pure function of the ledger and the GPUs' health.

* It always has every id of every GPU ever offered (an id that vanishes while the kubelet allocates it crashes the kubelet).
* All ids of a failed GPU are Unhealthy. On a GPU that accepts no new containers (quarantine, MIG, maintenance) the used ids stay Healthy.
* A free replica needs some cores and memory beside it: without these on its GPU it is Unhealthy.
* Free memory blocks of a GPU that a container holds whole can't be granted: they are Unhealthy, so that the scheduler does not count
  them, once that container's own memory call has come or can't come any more (`open_ids`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from gpumgr.common.units import BLOCK_MEBIBYTES, Amounts, GpuName
from gpumgr.ledger.ids import RegisteredGpu, lowest
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.evaluators.mig import has_place, most_devices


@dataclass(frozen=True)
class GpuDevices:
    """One GPU's Healthy ids, as masks; all its other ids are Unhealthy. `numa_node` None: no preference."""

    gpu: RegisteredGpu
    healthy_cores: int
    healthy_blocks: int
    healthy_replicas: int = 0
    healthy_instances: int = 0
    numa_node: int | None = None


NodeDevices = tuple[GpuDevices, ...]


def node_devices(
    ledger: Ledger,
    node: NodeView,
    *,
    failed: Collection[GpuName],
    replicas: int = 0,
    open_ids: Collection[AllocationId] = (),
) -> NodeDevices:
    """`failed`: those of the closed GPUs that do not work. `replicas`: how many each GPU may have now; one on which MIG devices are created
    has as many as fit at most. A GPU may have less memory now than when it was registered (ECC was turned on)."""
    cores, blocks = ledger.held("core"), ledger.held("memory")
    result = []
    for registered in ledger.gpu_registry.gpus:
        gpu, claimed = registered.name, ledger.by_amount.get(registered.name, Amounts())
        shown = node.shown.get(gpu)
        owner = ledger.exclusive.get(gpu)
        if gpu in failed:
            healthy = (0, 0)
        elif gpu in node.unschedulable:
            healthy = (cores.get(gpu, 0), blocks.get(gpu, 0))
        elif owner is not None and owner.id not in open_ids:
            healthy = (registered.all_ids("core"), blocks.get(gpu, 0))
        else:
            present = registered.all_ids("memory") & (1 << (shown or registered).memory_blocks) - 1
            healthy = (registered.all_ids("core"), present | blocks.get(gpu, 0))
        if claimed != Amounts():
            claimed_blocks = registered.memory_blocks - blocks_with_ids(ledger, gpu)
            healthy = (_less(healthy[0], cores.get(gpu, 0), claimed.cores), _less(healthy[1], blocks.get(gpu, 0), claimed_blocks))
        held = ledger.held("replica").get(gpu, 0)
        left, number = ledger.available(gpu), min(replicas, registered.replicas)
        spare = min(left.cores, left.memory_mebibytes) > 0
        if not registered.memory_mebibytes:  # it is granted whole
            number, spare = min(number, 1), left.whole
        if profiles := node.mig_profiles.get(gpu):
            number, spare = min(number, most_devices(profiles)), has_place(profiles, ledger.used(gpu).slices)
        spare = spare and node.closed(gpu, "replica") is None
        healthy_replicas = 0 if gpu in failed else held | ((1 << number) - 1 if spare else 0)
        open_instances = ledger.held("mig").get(gpu, 0) if node.closed(gpu, "mig") else registered.all_ids("mig")
        healthy_instances = 0 if gpu in failed else node.instances.get(gpu, 0) & open_instances
        result.append(GpuDevices(registered, *healthy, healthy_replicas, healthy_instances, shown.numa_node if shown else None))
    return tuple(result)


def blocks_with_ids(ledger: Ledger, gpu: GpuName) -> int:
    """The most blocks of this GPU that may have ids beside the allocations without. Less than a block of its memory is in none."""
    left = ledger.gpu_registry.by_name[gpu].memory_mebibytes - ledger.by_amount.get(gpu, Amounts()).memory_mebibytes
    return max(0, left) // BLOCK_MEBIBYTES


def _less(healthy: int, held: int, claimed: int) -> int:
    """Healthy ids without `claimed` free ones: claims hold these amounts."""
    free = healthy & ~held
    return healthy & held | lowest(free, max(0, free.bit_count() - claimed))
