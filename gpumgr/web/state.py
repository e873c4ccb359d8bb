"""All that the page shows, as one document of plain JSON data: pure functions of a picture and the history.

What nobody told is null. What was told before the driver went away is null too: old numbers would look like news.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import gpumgr
from gpumgr.agent.picture import OutboxState, Picture
from gpumgr.allocator.history import Candidate, Entry
from gpumgr.allocator.ids import ALL_CORES, Card
from gpumgr.allocator.ledger import Allocation
from gpumgr.topology.devices import Gpu, GpuSample, NodeSnapshot
from gpumgr.topology.tree import Group, build_tree, indices
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.usage.picture import NodeUse

#: The newest ones; /api/history has them all.
HISTORY_SHOWN: Final = 50

_NOBODY_LOOKED: Final = NodeUse(taken_at=0.0)
_NOT_SAMPLED: Final = GpuSample(uuid="")


def state_document(picture: Picture, history: Sequence[Entry], *, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """The document of /api/state. `history` is oldest first; `clock` tells in monotonic seconds how old the sample is by now."""
    snapshot = picture.view.inventory.snapshot
    return {
        "node": picture.node,
        "at": picture.at,
        "version": gpumgr.__version__,
        "driver_version": snapshot.driver_version,
        "cuda_version": snapshot.cuda_version,
        "ready": not picture.not_ready,
        "not_ready": list(picture.not_ready),
        "enforcement": [{"mechanism": mechanism, "keeps": keeps} for mechanism, keeps in picture.enforcement],
        **_topology(snapshot),
        "gpus": gpu_rows(picture),
        # GPUs that the driver lists and can't describe, and that were never offered: they have no name and no card.
        "failures": [
            {"index": failure.index, "uuid": failure.uuid, "message": failure.reason}
            for failure in picture.view.inventory.unnamed(picture.view.ledger.cards)
        ],
        "containers": container_rows(picture, picture.view.ledger.allocations.values()),
        "history": [entry_fields(entry) for entry in reversed(history[-HISTORY_SHOWN:])],
        "health": _health(picture, clock()),
    }


def container_rows(picture: Picture, allocations: Iterable[Allocation]) -> list[dict[str, Any]]:
    """A row for each allocation on each of its GPUs, oldest first. All allocations are in the picture's ledger."""
    uses = (picture.use if picture.use and picture.nvml_up else _NOBODY_LOOKED).containers
    room = {gpu: _memory_bytes(card, shown) for gpu, (card, shown) in _cards(picture).items()}
    rows = []
    for allocation in sorted(allocations, key=lambda a: (a.granted_at, a.id)):
        namespace, pod = allocation.pod or (None, None)
        for gpu in dict.fromkeys((*allocation.gpus, *allocation.cores, *allocation.blocks)):
            cores = allocation.cores.get(gpu, 0)
            use = uses.get((allocation.id, gpu))
            told = use is not None and (use.memory_bytes is not None or bool(use.processes))
            rows.append(
                {
                    "allocation": allocation.id,
                    "namespace": namespace,
                    "pod": pod,
                    "uid": allocation.uid,
                    "container": allocation.container,
                    "init": allocation.init,
                    "gpu": gpu,
                    "cores": cores.bit_count(),
                    "memory_bytes": room[gpu] if cores == ALL_CORES else allocation.blocks.get(gpu, 0).bit_count() * BLOCK_BYTES,
                    "whole": allocation.whole,
                    "memory_used_bytes": use.memory_bytes if use else None,
                    "utilization_ratio": use.utilization_ratio if use else None,
                    "processes": use.process_count if use and told else None,
                    "over": allocation.id in picture.over,
                    "mechanisms": list(allocation.mechanisms),
                    "granted_at": allocation.granted_at,
                    "why": allocation.why,
                }
            )
    return rows


def entry_fields(entry: Entry) -> dict[str, Any]:
    """An entry without the GPUs that it was chosen among."""
    return {
        "number": entry.number,
        "at": entry.at,
        "what": entry.what,
        "id": entry.id,
        "pod": list(entry.pod) if entry.pod else None,
        "pod_uid": entry.pod_uid,
        "container": entry.container,
        "call": entry.call,
        "kind": entry.kind,
        "size": entry.size,
        "gpus": list(entry.gpus),
        "evaluator": entry.evaluator,
        "why": entry.why,
        "code": entry.code,
        "mechanisms": list(entry.mechanisms),
    }


def candidate_fields(candidate: Candidate) -> dict[str, Any]:
    """By hand: `dataclasses.asdict` takes twenty times as long, and a pod that was refused all day has thousands."""
    return {
        "gpu": candidate.gpu,
        "index": candidate.index,
        "cores_free": candidate.cores_free,
        "memory_blocks_free": candidate.memory_blocks_free,
        "note": candidate.note,
    }


def _topology(snapshot: NodeSnapshot) -> dict[str, Any]:
    """`tree`, `nvlinks` and `levels`; numbers are the topology's rows, names have NVML's index. On the diagonal of `levels` stands X,
    as in `nvidia-smi topo -m`."""
    topology, rows = snapshot.topology, range(len(snapshot.topology))
    return {
        "tree": _tree(build_tree(topology), [f"GPU{gpu.index}" for gpu in snapshot.gpus]),
        "nvlinks": [{"a": a, "b": b, "links": links} for a in rows for b in rows[a + 1 :] if (links := topology.nvlinks[a][b])],
        "levels": [["X" if a == b else topology.levels[a][b].name for b in rows] for a in rows],
    }


def _tree(node: Group | int, labels: Sequence[str]) -> dict[str, Any]:
    if isinstance(node, int):
        return {"name": labels[node], "gpus": [node], "children": []}
    return {"name": node.name, "gpus": list(indices(node.mask)), "children": [_tree(child, labels) for child in node.children]}


def _cards(picture: Picture) -> dict[GpuName, tuple[Card, Gpu | None]]:
    """Every card with the GPU as the driver shows it now (None: it doesn't)."""
    cards = picture.view.ledger.cards
    shown = picture.view.inventory.gpus(cards)
    return {card.name: (card, shown.get(card.name)) for card in cards.cards}


def _memory_bytes(card: Card, shown: Gpu | None) -> int:
    return shown.memory_bytes if shown else card.memory_blocks * BLOCK_BYTES


def gpu_rows(picture: Picture) -> list[dict[str, Any]]:
    """A row for each GPU that the node ever had."""
    view, unfit = picture.view, picture.unfit()
    cores, blocks = view.ledger.held("core"), view.ledger.held("memory")
    samples = picture.sample.gpus if picture.sample and picture.nvml_up else {}
    rows = []
    for name, (card, shown) in _cards(picture).items():
        sample = samples.get(card.uuid, _NOT_SAMPLED)
        blocks_free = card.memory_blocks - blocks.get(name, 0).bit_count()
        rows.append(
            {
                "uuid": card.uuid,
                "name": name,
                "row": view.node.rows.get(name),
                "index": view.node.indices.get(name),
                "minor": shown.minor if shown else None,
                "model": shown.model if shown else None,
                "bus_id": shown.bus_id if shown else None,
                "numa_node": shown.numa_node if shown else None,
                "memory_bytes": _memory_bytes(card, shown),
                "memory_blocks": card.memory_blocks,
                "cores_free": CORES_PER_GPU - cores.get(name, 0).bit_count(),
                "memory_blocks_free": 0 if name in view.ledger.exclusive else blocks_free,
                "healthy": name not in unfit,
                "reason": unfit.get(name),
                "message": view.node.unfit.get(name),
                "cordon": _cordon(picture, card.uuid),
                "memory_used_bytes": sample.memory_used_bytes,
                "utilization_ratio": sample.utilization_ratio,
                "temperature_celsius": sample.temperature_celsius,
                "power_watts": sample.power_watts,
                "strangers": _strangers(picture, name),
            }
        )
    return rows


def _cordon(picture: Picture, uuid: str) -> dict[str, Any] | None:
    cordon = picture.cordons.get(uuid)
    return {"reason": cordon.reason, "since": cordon.since, "draining": cordon.draining} if cordon else None


def _strangers(picture: Picture, gpu: GpuName) -> dict[str, Any]:
    use = picture.use.gpus.get(gpu) if picture.use and picture.nvml_up else None
    if use is None:
        return {"processes": None, "memory_bytes": None}
    return {"processes": use.stranger_processes, "memory_bytes": use.stranger_memory_bytes}


def _health(picture: Picture, now: float) -> dict[str, Any]:
    return {
        "nvml_up": picture.nvml_up,
        "sampled_seconds_ago": None if picture.sampled_at is None else round(max(0.0, now - picture.sampled_at), 3),
        "registered": dict(picture.registered),
        "outbox": _outbox(picture.outbox) if picture.outbox else None,
    }


def _outbox(outbox: OutboxState) -> dict[str, Any]:
    return {
        "waiting": outbox.waiting,
        "dropped": outbox.dropped,
        "oldest_seconds": outbox.oldest_seconds,
        "away": outbox.away,
    }
