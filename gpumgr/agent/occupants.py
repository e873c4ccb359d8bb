"""Who is on a GPU, as JSON."""

from typing import Any

from gpumgr.agent.ports import Pods
from gpumgr.allocator.ids import Card
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.units import BLOCK_BYTES
from gpumgr.usage.picture import NodeUse


def pod_of(holder: Allocation, pods: Pods) -> tuple[PodKey, str] | None:
    """Name and UID of its pod, as far as the API server or the ledger knows them; of a static pod the UID is its mirror's."""
    view = shown_pod_of(holder, pods)
    if view is not None:
        return view.key, view.uid
    return (holder.pod, holder.uid) if holder.pod and holder.uid else None


def shown_pod_of(holder: Allocation, pods: Pods) -> PodView | None:
    """Its pod as the API server has it, this very life of it. Of a static pod the ledger may have the kubelet's UID, or its mirror's."""
    view = pods.get(holder.pod) if holder.pod else None
    if view is None and holder.uid:
        view = pods.by_uid(holder.uid)
    return view if view is not None and holder.uid in (None, view.uid, view.runtime_uid) else None


def container_row(card: Card, holder: Allocation, pods: Pods) -> dict[str, Any]:
    """What the allocation has on this card, under the names of /api/state."""
    name = pod_of(holder, pods)
    namespace, pod = name[0] if name else holder.pod or (None, None)
    blocks = card.memory_blocks if holder.whole else holder.blocks.get(card.name, 0).bit_count()
    return {
        "allocation": holder.id,
        "namespace": namespace,
        "pod": pod,
        "uid": name[1] if name else holder.uid,
        "container": holder.container,
        "init": holder.init,
        "gpu": card.name,
        "cores": holder.cores.get(card.name, 0).bit_count(),
        "memory_bytes": blocks * BLOCK_BYTES,
        "whole": holder.whole,
        "granted_at": holder.granted_at,
    }


def stranger_rows(card: Card, use: NodeUse | None) -> list[dict[str, Any]]:
    """Processes on this card that no allocation lets be there, by pid; none where nobody looked yet."""
    found = [stranger for stranger in use.strangers.values() if stranger.uuid == card.uuid] if use else []
    return [
        {"pid": each.pid, "memory_bytes": each.memory_bytes, "container": each.container}
        for each in sorted(found, key=lambda stranger: stranger.pid)
    ]
