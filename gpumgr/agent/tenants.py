"""Allocations as enforcement sees them."""

from collections.abc import Mapping

from gpumgr.agent.ports import Pods
from gpumgr.allocator.ids import Cards
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodView
from gpumgr.allocator.tenant import Tenant
from gpumgr.topology.devices import Gpu
from gpumgr.units import BLOCK_BYTES, GpuName


def view_of(allocation: Allocation, pods: Pods) -> PodView | None:
    """The allocation's pod as the API server has it; None if it is not known, or known under this name only in another life."""
    view = pods.get(allocation.pod) if allocation.pod else None
    return None if view is None or allocation.uid not in (None, view.uid) else view


def tenant_of(allocation: Allocation, cards: Cards, gpus: Mapping[GpuName, Gpu], view: PodView | None) -> Tenant | None:
    """The tenant, if this allocation shares a GPU; None for whole GPUs and for gpu-manager's records, whose limits are not ours.

    `gpus` are those that the driver shows now; `view` is the allocation's pod, if it is known.
    """
    if allocation.whole or allocation.anonymous or not allocation.gpus:
        return None
    card = cards.by_name[allocation.gpus[0]]
    gpu = gpus.get(card.name)
    return Tenant(
        allocation=allocation.id,
        gpu=card.name,
        uuid=card.uuid,
        minor=gpu.minor if gpu else None,
        bus_id=gpu.bus_id if gpu else None,
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        cores=allocation.core_count,
        memory_bytes=allocation.block_count * BLOCK_BYTES,
        pod=allocation.pod,
        pod_uid=allocation.uid,
        container=allocation.container,
        core_limit=view.core_limit if view else None,
        runtime_uid=view.runtime_uid if view else None,
    )
