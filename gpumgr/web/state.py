"""The document of /api/state: pure functions of a report and the history.

A value that is not known is null. Samples taken before the driver became unavailable are null, too, since they may be outdated.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import gpumgr
from gpumgr.agent.api import (
    AgentHealth,
    ContainerRow,
    CordonRow,
    Failure,
    GpuRow,
    NodeState,
    NvLinks,
    QueueRow,
    TreeNode,
    UnattributedSum,
)
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.rows import container_row
from gpumgr.common.units import BLOCK_BYTES, BLOCK_MEBIBYTES, GpuName
from gpumgr.ledger.gpu_limits import describe_limits
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.usage.node_use import NodeUse
from gpumgr.placement.topology.devices import Gpu, GpuSample, Topology
from gpumgr.placement.topology.tree import Group, build_tree, indices

#: The number of newest entries in the document; /api/history has all.
HISTORY_SHOWN: Final = 50

_NO_USE: Final = NodeUse(taken_at=0.0)
_NO_SAMPLE: Final = GpuSample(uuid="")


def node_state(report: NodeReport, history: Sequence[HistoryEntry], *, clock: Callable[[], float] = time.monotonic) -> NodeState:
    """`history` is oldest first; `clock` returns monotonic seconds, for the age of the sample."""
    snapshot = report.view.inventory.snapshot
    topology, rows = snapshot.topology, range(len(snapshot.topology))
    return NodeState(
        node=report.node,
        mode=report.mode,
        at=report.at,
        version=gpumgr.__version__,
        driver_version=snapshot.driver_version,
        cuda_version=snapshot.cuda_version,
        ready=not report.not_ready,
        not_ready=report.not_ready,
        limits=describe_limits((g.index, report.gpu_limits[g.uuid]) for g in snapshot.gpus if g.uuid in report.gpu_limits),
        tree=_tree(build_tree(topology), [f"GPU{gpu.index}" for gpu in snapshot.gpus]),
        nvlinks=_nvlinks(topology),
        levels=tuple(tuple("X" if a == b else topology.levels[a][b].name for b in rows) for a in rows),
        gpus=tuple(gpu_rows(report)),
        # GPUs that the driver lists and cannot describe, and that were never registered: they have no name.
        failures=tuple(
            Failure(index=failure.index, uuid=failure.uuid, message=failure.reason)
            for failure in report.view.inventory.unnamed(report.view.ledger.gpu_registry)
        ),
        containers=tuple(container_rows(report, report.view.ledger.allocations.values())),
        history=tuple(replace(entry, candidates=()) for entry in reversed(history[-HISTORY_SHOWN:])),
        health=_health(report, clock()),
    )


def container_rows(report: NodeReport, allocations: Iterable[Allocation]) -> list[ContainerRow]:
    """A row for each allocation on each of its GPUs, oldest first. All allocations must be in the report's ledger."""
    uses = (report.use if report.use and report.nvml_up else _NO_USE).containers
    memory = {gpu: _memory_bytes(registered, shown) for gpu, (registered, shown) in _registered(report).items()}
    return [
        container_row(allocation, gpu, memory[gpu], use=uses.get((allocation.id, gpu)), over=(allocation.id, gpu) in report.over)
        for allocation in sorted(allocations, key=lambda a: (a.granted_at, a.id))
        for gpu in allocation.places
    ]


def gpu_rows(report: NodeReport) -> list[GpuRow]:
    """A row for each GPU that the node ever had."""
    view, unschedulable = report.view, report.unschedulable()
    samples = report.sample.gpus if report.sample and report.nvml_up else {}
    rows = []
    for name, (registered, shown) in _registered(report).items():
        sample = samples.get(registered.uuid, _NO_SAMPLE)
        available = view.ledger.available(name)
        rows.append(
            GpuRow(
                uuid=registered.uuid,
                name=name,
                row=view.node.rows.get(name),
                index=view.node.indices.get(name),
                minor=shown.minor if shown else None,
                model=shown.model if shown else None,
                bus_id=shown.bus_id if shown else None,
                numa_node=shown.numa_node if shown else None,
                memory_bytes=_memory_bytes(registered, shown),
                memory_blocks=registered.memory_blocks,
                cores_free=available.cores,
                memory_blocks_free=available.memory_mebibytes // BLOCK_MEBIBYTES,
                healthy=name not in unschedulable,
                reason=unschedulable.get(name),
                message=view.node.out_of_service.get(name),
                cordon=_cordon(report, registered.uuid),
                memory_used_bytes=sample.memory_used_bytes,
                utilization_ratio=sample.utilization_ratio,
                temperature_celsius=sample.temperature_celsius,
                power_watts=sample.power_watts,
                unattributed=_unattributed(report, name),
                limits=report.gpu_limits.get(registered.uuid),
                limits_excess_bytes=_limits_excess_bytes(report, registered),
            )
        )
    return rows


def _nvlinks(topology: Topology) -> tuple[NvLinks, ...]:
    rows = range(len(topology))
    return tuple(NvLinks(a=a, b=b, links=links) for a in rows for b in rows[a + 1 :] if (links := topology.nvlinks[a][b]))


def _tree(node: Group | int, labels: Sequence[str]) -> TreeNode:
    if isinstance(node, int):
        return TreeNode(name=labels[node], gpus=(node,))
    return TreeNode(
        name=node.name, gpus=tuple(indices(node.mask)), children=tuple(_tree(child, labels) for child in node.children)
    )


def _registered(report: NodeReport) -> dict[GpuName, tuple[RegisteredGpu, Gpu | None]]:
    """Every registered GPU with what the driver shows of it now (None: nothing)."""
    gpu_registry = report.view.ledger.gpu_registry
    shown = report.view.inventory.gpus(gpu_registry)
    return {registered.name: (registered, shown.get(registered.name)) for registered in gpu_registry.gpus}


def _memory_bytes(registered: RegisteredGpu, shown: Gpu | None) -> int | None:
    return shown.memory_bytes if shown else registered.memory_blocks * BLOCK_BYTES or None


def _limits_excess_bytes(report: NodeReport, gpu: RegisteredGpu) -> int | None:
    if report.use is None or not report.nvml_up:
        return None
    ledger, uses = report.view.ledger, report.use.containers
    beyond = 0
    for holder in ledger.on(gpu.name):
        use = uses.get((holder.id, gpu.name))
        if use is not None and use.memory_limit_bytes is not None:
            beyond += max(0, use.memory_limit_bytes - (holder.gpus[gpu.name].memory_mebibytes << 20))
    return max(0, (ledger.used(gpu.name).memory_mebibytes - gpu.memory_mebibytes << 20) + beyond) if beyond else 0


def _cordon(report: NodeReport, uuid: str) -> CordonRow | None:
    cordon = report.cordons.get(uuid)
    return CordonRow(reason=cordon.reason, since=cordon.since, draining=cordon.draining) if cordon else None


def _unattributed(report: NodeReport, gpu: GpuName) -> UnattributedSum:
    use = report.use.gpus.get(gpu) if report.use and report.nvml_up else None
    return (
        UnattributedSum(processes=use.unattributed_processes, memory_bytes=use.unattributed_memory_bytes)
        if use
        else UnattributedSum()
    )


def _health(report: NodeReport, now: float) -> AgentHealth:
    queue = report.api_queue
    return AgentHealth(
        nvml_up=report.nvml_up,
        sampled_seconds_ago=None if report.sampled_at is None else round(max(0.0, now - report.sampled_at), 3),
        registered=dict(report.registered),
        warnings=report.warnings,
        api_queue=QueueRow(waiting=queue.waiting, dropped=queue.dropped, oldest_seconds=queue.oldest_seconds, away=queue.away)
        if queue
        else None,
    )
