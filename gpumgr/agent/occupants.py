"""Who is on a GPU, as JSON."""

from typing import Any

from gpumgr.agent.ports import Pods
from gpumgr.agent.tenants import view_of
from gpumgr.allocator.ids import Card
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodKey
from gpumgr.units import BLOCK_BYTES
from gpumgr.usage.picture import NodeUse


def pod_of(holder: Allocation, pods: Pods) -> tuple[PodKey, str] | None:
    """Name and UID of its pod, as far as the ledger or the API server knows them."""
    if holder.pod and holder.uid:
        return holder.pod, holder.uid
    view = pods.by_uid(holder.uid) if holder.uid else view_of(holder, pods)
    return ((view.namespace, view.name), view.uid) if view else None


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
