"""Converts allocations to tenants, the form that enforcement uses."""

from collections.abc import Iterator, Mapping

from gpumgr.agent.inventory import Inventory
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.placement.pods import USUAL_PRIORITY, PodView
from gpumgr.placement.topology.devices import Gpu


def is_share(allocation: Allocation) -> bool:
    return not (allocation.whole or allocation.anonymous or allocation.admin or allocation.by_mig or not allocation.gpus)


def tenant_of(
    allocation: Allocation, gpu_registry: GpuRegistry, gpus: Mapping[GpuName, Gpu], view: PodView | None
) -> GpuShare | None:
    """The tenant, if this allocation shares a GPU. None for all others (see `is_share`), which gpumgr does not limit.

    `gpus` are the GPUs that the driver lists now; `view` is the allocation's pod, if it is known.
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
        resized=allocation.resize is not None and not allocation.resize.refused,
    )


def tenants(ledger: Ledger, inventory: Inventory, pods: Pods) -> Iterator[tuple[GpuShare, tuple[str, ...]]]:
    """The tenants of all allocations, with the mechanisms that limit them."""
    gpus = inventory.gpus(ledger.gpu_registry)
    for allocation in ledger.allocations.values():
        view = find_pod(pods, allocation.pod, allocation.uid)
        tenant = tenant_of(allocation, ledger.gpu_registry, gpus, view)
        if tenant is not None:
            yield tenant, allocation.mechanisms


def neighbours(ledger: Ledger, tenant: GpuShare) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Other pods' shares on the tenant's GPUs, with their mechanisms."""
    own = ledger.allocations.get(tenant.allocation)
    for other in [other for gpu in tenant.gpus for other in ledger.on(gpu.name)]:
        if other.id != tenant.allocation and other.mechanisms and not (own and own.same_pod(other) and own.init != other.init):
            yield other.describe(), other.mechanisms
