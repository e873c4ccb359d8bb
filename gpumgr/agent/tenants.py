"""Allocations as enforcement sees them."""

from collections.abc import Mapping

from gpumgr.allocator.gpu_share import GpuShare
from gpumgr.allocator.ids import GpuRegistry
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodView
from gpumgr.topology.devices import Gpu
from gpumgr.units import GpuName


def is_share(allocation: Allocation) -> bool:
    return not (allocation.whole or allocation.anonymous or not allocation.gpus)


def tenant_of(
    allocation: Allocation, gpu_registry: GpuRegistry, gpus: Mapping[GpuName, Gpu], view: PodView | None
) -> GpuShare | None:
    """The tenant, if this allocation shares a GPU; None for whole GPUs and for gpu-manager's records, whose limits are not ours.

    `gpus` are those that the driver shows now; `view` is the allocation's pod, if it is known.
    """
    if not is_share(allocation):
        return None
    card = gpu_registry.by_name[next(iter(allocation.gpus))]
    gpu, amounts = gpus.get(card.name), allocation.gpus[card.name]
    return GpuShare(
        allocation=allocation.id,
        gpu=card.name,
        uuid=card.uuid,
        minor=gpu.minor if gpu else None,
        bus_id=gpu.bus_id if gpu else None,
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        cores=amounts.cores,
        memory_bytes=amounts.memory_mebibytes << 20,
        pod=allocation.pod,
        pod_uid=allocation.uid,
        container=allocation.container,
        core_limit=view.core_limit if view else None,
        runtime_uid=view.runtime_uid if view else None,
    )
