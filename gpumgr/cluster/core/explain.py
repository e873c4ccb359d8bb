"""The text of a rejection: the number of nodes with each reason, and the node that lacks least.

kube-scheduler gets one text for all nodes, because it handles a text for each node slowly. It prints the text after "1 " in
"0/40 nodes are available: 1 ...", with a full stop.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gpumgr.cluster.core.choose import Misfit

MAX_CHARACTERS: Final = 300


class Rejection(msgspec.Struct, frozen=True):
    """No offered node fits. `text`: the reasons."""

    text: str


@dataclass
class _Group:
    count: int
    node: str
    misfit: Misfit


def explain(misfits: Iterable[tuple[int, str, Misfit]]) -> str:
    """The reasons as text. `misfits`: at least one (count, node, misfit). `count` nodes have the misfit's reason, and `node` lacks least
    among them."""
    groups: dict[tuple[object, ...], _Group] = {}
    for count, node, misfit in misfits:
        group = groups.setdefault(misfit.reason, _Group(0, node, misfit))
        group.count += count
        if (misfit.distance, node) < (group.misfit.distance, group.node):
            group.node, group.misfit = node, misfit
    ordered = sorted(groups.values(), key=lambda group: (group.misfit.less, -group.count, group.node))
    total = sum(group.count for group in ordered)
    if total == 1:
        return bounded(f"has {_reason(ordered[0].misfit)}{_closest(ordered[0].misfit, '')}")
    nearest = min(ordered, key=lambda group: (group.misfit.container is None, group.misfit.distance, group.node))
    reasons = []
    for group in ordered:
        closest = _closest(group.misfit, group.node[:63]) if group is nearest else ""
        reasons.append(f"{group.count} {'has' if group.count == 1 else 'have'} {_reason(group.misfit)}{closest}")
    return bounded(f"for the {total} nodes with enough in total: {', '.join(reasons)}")


def bounded(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 4] + " ..."


def _reason(misfit: Misfit) -> str:
    container = misfit.container
    if misfit.less:
        return "less free"
    if container is None:
        return "no GPUs that gpumgr can use"
    gpus, constraints = container.gpus, misfit.constraints
    numa = " on one NUMA node" if constraints.same_numa_node and gpus > 1 else ""
    if misfit.agent_chooses:
        return f"a Topology Manager policy and not only GPUs{constraints.text}{numa}"
    if misfit.none_allowed:
        return f"no GPU{constraints.text}{' with a known NUMA node' if numa else ''}"
    if container.replica is not None:
        wanted = str(container.replica).replace("GPU", "MIG device", 1) if misfit.mig else str(container.replica)
        return f"no {'place' if misfit.mig else 'room'} for {wanted}{constraints.text}{numa}"
    if container.whole:
        memory = f" with {memory_text(container.memory_mebibytes)} in all" if container.memory_mebibytes else ""
        wanted = f"fewer than {gpus} entirely free GPUs" if gpus > 1 else "no entirely free GPU"
        return f"{wanted}{constraints.text}{numa}{memory}"
    return f"no GPU{constraints.text} with {container.cores} free cores and {memory_text(container.memory_mebibytes)}"


def _closest(misfit: Misfit, node: str) -> str:
    """What is free where the request lacks least; `node` is named if it is not empty."""
    if misfit.container is None or misfit.none_allowed:
        return ""
    if misfit.container.whole or misfit.container.gpus > 1:
        found = f"{misfit.free_gpus} free"
        return f" (closest: {node}, {found})" if node else f" ({found})"
    if misfit.closest is None:
        return ""
    gpu, room = misfit.closest
    where = f"{node} GPU {gpu}".strip()
    return f" (closest: {where}, {room.cores} cores and {memory_text(room.memory_mebibytes)})"


def memory_text(mebibytes: int) -> str:
    return f"{mebibytes / 1024:g} GiB" if mebibytes >= 1024 and mebibytes % 256 == 0 else f"{mebibytes} MiB"
