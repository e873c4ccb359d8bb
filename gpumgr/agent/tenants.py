"""Allocations as enforcement sees them."""

from collections.abc import Mapping

from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.pods import USUAL_PRIORITY, PodView
from gpumgr.placement.topology.devices import Gpu


def is_share(allocation: Allocation) -> bool:
    return not (allocation.whole or allocation.anonymous or allocation.admin or allocation.by_mig or not allocation.gpus)


def tenant_of(
    allocation: Allocation, gpu_registry: GpuRegistry, gpus: Mapping[GpuName, Gpu], view: PodView | None
) -> GpuShare | None:
    """The tenant, if this allocation shares a GPU; None for whole GPUs, and for gpu-manager's records, which gpumgr does not limit.

    `gpus` are the ones that the driver shows now; `view` is the allocation's pod, if it is known.
    """
    if not is_share(allocation):
        return None
    parts, spec = [], view.container(allocation.container) if view else None
    for name in allocation.gpus:
        limits = allocation.limits_on(name)
        shown = gpus.get(name)
        part = SharedGpu(
            name=name,
            uuid=gpu_registry.by_name[name].uuid,
            bus_id=shown.bus_id if shown else None,
            total_bytes=shown.memory_bytes if shown else None,
            cores=limits.cores,
            memory_bytes=limits.memory_mebibytes << 20,
        )
        parts.append(part)
    return GpuShare(
        allocation=allocation.id,
        gpus=tuple(sorted(parts, key=lambda part: part.bus_id or "")),
        pod=allocation.pod,
        pod_uid=allocation.uid,
        container=allocation.container,
        core_limit=view.core_limit if view else None,
        runtime_uid=view.runtime_uid if view else None,
        priority=spec.priority if spec else USUAL_PRIORITY,
        claim=allocation.claim is not None,
    )
