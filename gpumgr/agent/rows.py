"""Rows of the JSON API (gpumgr.agent.api) from allocations, GPUs and their processes."""

from collections.abc import Collection, Iterable

from gpumgr.agent.api import ContainerRow, UnattributedProcess
from gpumgr.agent.pods import pod_of
from gpumgr.agent.ports import Pods
from gpumgr.common.units import BLOCK_BYTES, GpuName
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.suspension import Suspension
from gpumgr.ledger.usage.node_use import AllocationOnGpu, ContainerUse, NodeUse
from gpumgr.placement.pods import PodKey


def container_row(
    holder: Allocation,
    gpu: GpuName,
    gpu_memory_bytes: int | None,
    *,
    pod: tuple[PodKey, str] | None = None,
    use: ContainerUse | None = None,
    over: bool = False,
    suspension: Suspension | None = None,
) -> ContainerRow:
    """What the allocation holds on this GPU, and what it uses. `pod`, if given, replaces the pod that the allocation names."""
    key, uid = pod or (holder.pod, holder.uid)
    namespace, name = key or (None, None)
    amounts = holder.resized.get(gpu) or holder.limits.get(gpu) or holder.amounts_on(gpu)
    return ContainerRow(
        allocation=holder.id,
        namespace=namespace,
        pod=name,
        uid=uid,
        container=holder.container,
        init=holder.init,
        gpu=gpu,
        cores=amounts.cores,
        memory_bytes=gpu_memory_bytes if amounts.whole else amounts.memory_mebibytes << 20,
        whole=holder.whole,
        memory_limit_bytes=use.memory_limit_bytes if use and use.memory_limit_bytes != use.memory_request_bytes else None,
        memory_used_bytes=use.memory_bytes if use else None,
        utilization_ratio=use.utilization_ratio if use else None,
        processes=use.process_count if use else None,
        held_ratio=use.turns.held_ratio if use and use.turns else None,
        waited_ratio=use.turns.waited_ratio if use and use.turns else None,
        over=over,
        suspension=suspension.state if suspension and suspension.state != "running" else "",
        suspension_reason=suspension.reason if suspension else "",
        mechanisms=holder.mechanisms,
        granted_at=holder.granted_at,
        why=holder.why,
    )


def rows_on(
    gpu: RegisteredGpu, holders: Iterable[Allocation], pods: Pods, *, use: NodeUse | None, over: Collection[AllocationOnGpu]
) -> list[ContainerRow]:
    """A row for each holder of the GPU. `use` is None before the first sample; `over`: the allocations over their memory."""
    memory_bytes, uses = gpu.memory_blocks * BLOCK_BYTES or None, use.containers if use else {}
    return [
        container_row(
            holder,
            gpu.name,
            memory_bytes,
            pod=pod_of(holder, pods),
            use=uses.get((holder.id, gpu.name)),
            over=(holder.id, gpu.name) in over,
        )
        for holder in holders
    ]


def unattributed_rows(gpu: RegisteredGpu, use: NodeUse | None) -> list[UnattributedProcess]:
    """Processes on this GPU that belong to no allocation there, by pid; empty before the first sample."""
    found = [process for process in use.unattributed.values() if process.uuid == gpu.uuid] if use else []
    return [
        UnattributedProcess(pid=each.pid, memory_bytes=each.memory_bytes, container=each.container)
        for each in sorted(found, key=lambda process: process.pid)
    ]
