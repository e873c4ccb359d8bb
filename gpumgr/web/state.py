"""The documents about a node and about one pod: pure functions of a report and the history.

An unknown value is null. While the driver is unavailable, sampled values are unknown.

Several pods may have had the same name one after another. `uid` is the newest pod's UID. Each allocation and entry has the UID of its own
pod. A static pod is shown with the UID of its mirror pod. Entries with the UID that the kubelet uses for a static pod are found, too.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

import gpumgr
from gpumgr.agent.api import (
    AgentHealth,
    ContainerRequest,
    ContainerRow,
    Failure,
    GpuRow,
    NodeState,
    NvLinks,
    PodDetails,
    QueueRow,
    TreeNode,
    container_row,
)
from gpumgr.agent.node_report import NodeReport
from gpumgr.common.units import BLOCK_BYTES, BLOCK_MEBIBYTES, GpuName
from gpumgr.ledger.gpu_share import describe_limits
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node_use import UnattributedSum
from gpumgr.placement.devices import Gpu, GpuSample, Topology
from gpumgr.placement.pods import PodKey, PodView
from gpumgr.placement.tree import Group, build_tree, indices

#: How many of the newest history entries the document of the node has. /api/history can return all.
HISTORY_SHOWN: Final = 50

_UNKNOWN: Final = UnattributedSum(processes=None, memory_bytes=None)
_NO_SAMPLE: Final = GpuSample(uuid="")


def node_state(report: NodeReport, history: Sequence[HistoryEntry], *, clock: Callable[[], float] = time.monotonic) -> NodeState:
    """`history` is oldest first. `clock` is monotonic, in seconds."""
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
        # GPUs that the driver lists but can't describe, without the ones that are in `gpus` according to their UUIDs.
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
    uses = report.current_use.containers
    memory = {gpu: _memory_bytes(registered, shown) for gpu, (registered, shown) in _registered(report).items()}
    return [
        container_row(
            allocation,
            gpu,
            memory[gpu],
            use=uses.get((allocation.id, gpu)),
            over=(allocation.id, gpu) in report.over,
            suspension=report.view.suspensions.get(allocation.id),
        )
        for allocation in sorted(allocations, key=lambda a: (a.granted_at, a.id))
        for gpu in allocation.places
    ]


def gpu_rows(report: NodeReport) -> list[GpuRow]:
    """A row for each registered GPU. A GPU that was removed from the node stays registered until an operator forgets it."""
    view, unschedulable = report.view, report.unschedulable()
    samples, use = report.current_samples, report.current_use
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
                cordon=report.cordons.get(registered.uuid),
                memory_used_bytes=sample.memory_used_bytes,
                utilization_ratio=sample.utilization_ratio,
                temperature_celsius=sample.temperature_celsius,
                power_watts=sample.power_watts,
                unattributed=use.gpus.get(name) or _UNKNOWN,
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
    """Every registered GPU, with what the driver shows of it now (None: nothing)."""
    gpu_registry = report.view.ledger.gpu_registry
    shown = report.view.inventory.gpus(gpu_registry)
    return {registered.name: (registered, shown.get(registered.name)) for registered in gpu_registry.gpus}


def _memory_bytes(registered: RegisteredGpu, shown: Gpu | None) -> int | None:
    return shown.memory_bytes if shown else registered.memory_blocks * BLOCK_BYTES or None


def _limits_excess_bytes(report: NodeReport, gpu: RegisteredGpu) -> int | None:
    if report.use is None or not report.nvml_up:
        return None
    away = {name for name, each in report.view.suspensions.items() if each.away}
    uses = [use for (name, place), use in report.use.containers.items() if place == gpu.name and name not in away]
    return max(0, sum(use.memory_limit_bytes or 0 for use in uses) - (gpu.memory_mebibytes << 20))


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


#: The pod of an allocation or entry: name and UID, where known.
Holder = tuple[PodKey | None, str | None]


def pod_details(
    report: NodeReport, view: PodView | None, namespace: str, pod: str, history: Sequence[HistoryEntry]
) -> PodDetails | None:
    """The document of /api/pods/NAMESPACE/POD; None if nothing is known. `view` is the API server's pod, `history` is oldest first.

    The document has the entries of all pods of this name. It also has the entries about these pods' GPUs: from the first entry of the pods
    to the last, or up to now while an allocation exists.
    """
    ledger = report.view.ledger
    holders = _holders(ledger, history)
    entries = _with_holders(holders, history)
    uids = _uids((namespace, pod), view, [*holders.values(), *(holder for _, holder in entries)])

    def concerns(holder: Holder) -> bool:
        return holder[0] == (namespace, pod) or (holder[0] is None and holder[1] in uids)

    allocations = [a for a in ledger.allocations.values() if concerns((a.pod, a.uid))]
    entries = [(entry, holder) for entry, holder in entries if concerns(holder)]
    if view is None and not allocations and not entries:
        return None
    uids_by_age = (*(holder[1] for _, holder in entries), *(a.uid for a in sorted(allocations, key=lambda a: a.granted_at)))
    own, held = {entry.number for entry, _ in entries}, {gpu for a in allocations for gpu in a.places}
    seen = range(min(own, default=0), sys.maxsize if allocations else max(own, default=0))
    used = held.union(*(entry.gpus for entry, _ in entries))
    return PodDetails(
        namespace=namespace,
        pod=pod,
        uid=view.uid if view else next((uid for uid in reversed(uids_by_age) if uid), None),
        phase=view.phase if view else None,
        reason=view.reason if view else None,
        message=view.message if view else None,
        request=tuple(
            ContainerRequest(
                container=spec.name,
                kind=spec.kind,
                cores=spec.cores,
                memory_blocks=spec.memory_blocks,
                replicas=str(spec.replicas) if spec.replicas else msgspec.UNSET,
            )
            for spec in (view.containers if view else ())
            if spec.wants_gpu
        ),
        allocations=tuple(container_rows(report, allocations)),
        gpus=tuple(row for row in gpu_rows(report) if row.name in held),
        history=tuple(
            e for e in history if e.number in own or (e.what == "gpu" and e.number in seen and not used.isdisjoint(e.gpus))
        ),
    )


def entries_of(ledger: Ledger, history: Sequence[HistoryEntry], pod: PodKey) -> list[HistoryEntry]:
    """The pod's entries, also from before its name was known."""
    return [entry for entry, holder in _with_holders(_holders(ledger, history), history) if holder[0] == pod]


def _holders(ledger: Ledger, history: Sequence[HistoryEntry]) -> dict[AllocationId, Holder]:
    """The last known pod of each allocation. Some allocations are granted before the pod's name is known, or with a wrong name."""
    holders: dict[AllocationId, Holder] = {e.id: (e.pod, e.pod_uid) for e in history if e.id and (e.pod or e.pod_uid)}
    return holders | {a.id: (a.pod, a.uid) for a in ledger.allocations.values() if a.pod or a.uid}


def _with_holders(holders: dict[AllocationId, Holder], history: Sequence[HistoryEntry]) -> list[tuple[HistoryEntry, Holder]]:
    return [(entry, holders.get(entry.id or "", (entry.pod, entry.pod_uid))) for entry in history]


def _uids(pod: PodKey, view: PodView | None, holders: Sequence[Holder]) -> set[str]:
    known = {uid for name, uid in holders if name == pod and uid}
    return known | {uid for uid in (view.uid, view.runtime_uid) if uid} if view else known
