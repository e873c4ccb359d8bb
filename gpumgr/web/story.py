"""All that is known of one pod: what it asks for, what it holds, what happened to it and to its GPUs meanwhile. Pure.

Names recur, so a story is a name's: `uid` is the UID of the newest life under it, `earlier_uids` are those of lives before that, and
every allocation and entry says whose it is. A static pod goes by its mirror's UID; the kubelet's own UID of it is the same life.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from gpumgr.agent.picture import Picture
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Allocation, AllocationId, Ledger
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.units import GpuName
from gpumgr.web.state import candidate_fields, container_rows, entry_fields, gpu_rows

#: Whose something is: the pod's name and UID, as far as they are known.
Holder = tuple[PodKey | None, str | None]


def known_pods(ledger: Ledger, views: Iterable[PodView], history: Sequence[Entry]) -> list[PodKey]:
    """The names of which there is a story, in order. `views` are the pods that the API server has; those that ask for no
    GPU have none."""
    holders = _holders(ledger, history)
    told = [holder for _, holder in _told(holders, history)]
    return sorted({view.key for view in views if view.containers} | {key for key, _ in (*holders.values(), *told) if key})


def story(picture: Picture, view: PodView | None, namespace: str, pod: str, history: Sequence[Entry]) -> dict[str, Any] | None:
    """`view` is what the API server has under this name now (None: nothing), `history` is oldest first. None: nothing is known.

    `reason` and `message` stand in the pod's status. `request` has the containers that ask for GPUs, in the kubelet's order;
    `allocations` rows as in /api/state, `history` whole entries, both oldest first and of all lives, and with what became of a GPU
    while the pod had it; `gpus` are the rows of those that it has. `earlier_uids` are newest first.
    """
    ledger = picture.view.ledger
    holders = _holders(ledger, history)
    told = _told(holders, history)
    uids = _uids((namespace, pod), view, [*holders.values(), *(holder for _, holder in told)])

    def concerns(holder: Holder) -> bool:
        return holder[0] == (namespace, pod) or (holder[0] is None and holder[1] in uids)

    allocations = [a for a in ledger.allocations.values() if concerns((a.pod, a.uid))]
    told = [(entry, holder) for entry, holder in told if concerns(holder)]
    if view is None and not allocations and not told:
        return None
    lives = _lives(view, allocations, told)
    own, held = {entry.number for entry, _ in told}, {gpu for a in allocations for gpu in _gpus_of(a)}
    stays = _stays(allocations, [entry for entry, _ in told])
    return {
        "namespace": namespace,
        "pod": pod,
        "uid": lives[0] if lives else None,
        "earlier_uids": lives[1:],
        "phase": view.phase if view else None,
        "reason": view.reason if view else None,
        "message": view.message if view else None,
        "request": [
            {"container": spec.name, "kind": spec.kind, "cores": spec.cores, "memory_blocks": spec.memory_blocks}
            for spec in (view.containers if view else ())
            if spec.cores or spec.memory_blocks
        ],
        "allocations": container_rows(picture, allocations),
        "gpus": [row for row in gpu_rows(picture) if row["name"] in held],
        "history": [
            {**entry_fields(entry), "candidates": [candidate_fields(gpu) for gpu in entry.candidates]}
            for entry in history
            if entry.number in own or (entry.what == "gpu" and _befell(entry, stays))
        ],
    }


def _holders(ledger: Ledger, history: Sequence[Entry]) -> dict[AllocationId, Holder]:
    """Whose each allocation is, by what was learnt last: some are granted before the name is known, or under a wrong one."""
    holders: dict[AllocationId, Holder] = {e.id: (e.pod, e.pod_uid) for e in history if e.id and (e.pod or e.pod_uid)}
    return holders | {a.id: (a.pod, a.uid) for a in ledger.allocations.values() if a.pod or a.uid}


def _told(holders: dict[AllocationId, Holder], history: Sequence[Entry]) -> list[tuple[Entry, Holder]]:
    """Each entry with whom it concerns."""
    return [(entry, holders.get(entry.id or "", (entry.pod, entry.pod_uid))) for entry in history]


def _gpus_of(allocation: Allocation) -> set[GpuName]:
    return {*allocation.gpus, *allocation.cores, *allocation.blocks}


def _stays(allocations: Sequence[Allocation], told: Sequence[Entry]) -> list[tuple[set[GpuName], float, float]]:
    """On which GPUs the pod was, from when until when (unix seconds), as far as it is still known."""
    granted = {entry.id: entry for entry in reversed(told) if entry.what == "granted"}
    ended = [(granted[entry.id], entry.at) for entry in told if entry.what == "freed" and entry.id in granted]
    return [
        *((_gpus_of(a), a.granted_at, inf) for a in allocations),
        *((set(grant.gpus), grant.at, until) for grant, until in ended),
    ]


def _befell(entry: Entry, stays: Sequence[tuple[set[GpuName], float, float]]) -> bool:
    """The pod was there when it happened to the GPU."""
    return any(not gpus.isdisjoint(entry.gpus) and since <= entry.at <= until for gpus, since, until in stays)


def _uids(pod: PodKey, view: PodView | None, holders: Sequence[Holder]) -> set[str]:
    """All UIDs under which this name was ever met."""
    known = {uid for name, uid in holders if name == pod and uid}
    return known | {uid for uid in (view.uid, view.runtime_uid) if uid} if view else known


def _lives(view: PodView | None, allocations: Sequence[Allocation], told: Sequence[tuple[Entry, Holder]]) -> list[str]:
    """The UIDs of all lives, newest first: what the API server has now, then by the moment when each was first met.

    A life may end after the next one began, so an end says nothing of when; one of which no more is left began before all others.
    """
    first = {holder[1]: -inf for entry, holder in told if entry.what == "freed"}
    met = [(entry.at, holder[1]) for entry, holder in told if entry.what != "freed"]
    met += [(a.granted_at, a.uid) for a in allocations]
    first.update((uid, at) for at, uid in sorted(met, key=lambda meeting: -meeting[0]))  # the earliest is put last, and stays
    lives = [uid for uid in sorted(first, key=lambda uid: first[uid]) if uid]
    if view is not None:
        lives = [uid for uid in lives if uid not in (view.uid, view.runtime_uid)] + [view.uid]
    return lives[::-1]
