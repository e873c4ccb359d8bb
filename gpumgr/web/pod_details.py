"""What is known of one pod: its request, its allocations, and what happened to it and to its GPUs. Pure.

Pods of one name may follow each other: `uid` is the UID of the newest, `earlier_uids` are those of earlier pods, and each allocation and
entry has the UID of its own pod. A static pod has its mirror pod's UID; the kubelet's own UID means the same pod.
"""

from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from gpumgr.agent.api import ContainerRequest, PodDetails
from gpumgr.agent.node_report import NodeReport
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.pods import PodKey, PodView
from gpumgr.web.state import container_rows, gpu_rows

#: The pod of an allocation or entry: name and UID, where they are known.
Holder = tuple[PodKey | None, str | None]


def pods_with_details(ledger: Ledger, views: Iterable[PodView], history: Sequence[HistoryEntry]) -> list[PodKey]:
    """The names of the pods with known details, sorted. `views` are the API server's pods; pods that request no GPU are left out."""
    holders = _holders(ledger, history)
    recorded = [holder for _, holder in _with_holders(holders, history)]
    return sorted({view.key for view in views if view.containers} | {key for key, _ in (*holders.values(), *recorded) if key})


def pod_details(
    report: NodeReport, view: PodView | None, namespace: str, pod: str, history: Sequence[HistoryEntry]
) -> PodDetails | None:
    """None if nothing is known. `view` is the API server's pod of this name (None: there is none), `history` is oldest first.

    The history has the entries of all pods of this name, and those of their GPUs from the time of the allocations.
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
    incarnations = _incarnations(view, allocations, entries)
    own, held = {entry.number for entry, _ in entries}, {gpu for a in allocations for gpu in a.places}
    periods = _periods(allocations, [entry for entry, _ in entries])
    return PodDetails(
        namespace=namespace,
        pod=pod,
        uid=incarnations[0] if incarnations else None,
        earlier_uids=tuple(incarnations[1:]),
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
        history=tuple(e for e in history if e.number in own or (e.what == "gpu" and _during(e, periods))),
    )


def _holders(ledger: Ledger, history: Sequence[HistoryEntry]) -> dict[AllocationId, Holder]:
    """The pod of each allocation by the newest information: some allocations are granted before the name is known, or under a wrong one."""
    holders: dict[AllocationId, Holder] = {e.id: (e.pod, e.pod_uid) for e in history if e.id and (e.pod or e.pod_uid)}
    return holders | {a.id: (a.pod, a.uid) for a in ledger.allocations.values() if a.pod or a.uid}


def _with_holders(holders: dict[AllocationId, Holder], history: Sequence[HistoryEntry]) -> list[tuple[HistoryEntry, Holder]]:
    return [(entry, holders.get(entry.id or "", (entry.pod, entry.pod_uid))) for entry in history]


def _periods(allocations: Sequence[Allocation], entries: Sequence[HistoryEntry]) -> list[tuple[set[GpuName], float, float]]:
    """The GPUs of each allocation, with its start and end (unix seconds), where they are known."""
    granted = {entry.id: entry for entry in reversed(entries) if entry.what == "granted"}
    ended = [(granted[entry.id], entry.at) for entry in entries if entry.what == "freed" and entry.id in granted]
    return [
        *((set(a.places), a.granted_at, inf) for a in allocations),
        *((set(grant.gpus), grant.at, until) for grant, until in ended),
    ]


def _during(entry: HistoryEntry, periods: Sequence[tuple[set[GpuName], float, float]]) -> bool:
    """Whether the pod had the GPU at the time of the entry."""
    return any(not gpus.isdisjoint(entry.gpus) and since <= entry.at <= until for gpus, since, until in periods)


def _uids(pod: PodKey, view: PodView | None, holders: Sequence[Holder]) -> set[str]:
    """All UIDs that pods of this name had."""
    known = {uid for name, uid in holders if name == pod and uid}
    return known | {uid for uid in (view.uid, view.runtime_uid) if uid} if view else known


def _incarnations(
    view: PodView | None, allocations: Sequence[Allocation], entries: Sequence[tuple[HistoryEntry, Holder]]
) -> list[str]:
    """The UIDs of all pods of the name, newest first: the API server's, then by the time when each was first seen.

    A pod may end after the next one began, so the order ignores the ends. A pod is last if only its end is known.
    """
    first = {holder[1]: -inf for entry, holder in entries if entry.what == "freed"}
    seen = [(entry.at, holder[1]) for entry, holder in entries if entry.what != "freed"]
    seen += [(a.granted_at, a.uid) for a in allocations]
    first.update(
        (uid, at) for at, uid in sorted(seen, key=lambda pair: -pair[0])
    )  # the earliest pod is put last, and stays there
    uids = [uid for uid in sorted(first, key=lambda uid: first[uid]) if uid]
    if view is not None:
        uids = [uid for uid in uids if uid not in (view.uid, view.runtime_uid)] + [view.uid]
    return uids[::-1]
