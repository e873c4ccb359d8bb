"""The text of a rejection: groups of reasons with their counts, and the closest miss of each.

kube-scheduler prints it after "1 " in "0/40 nodes are available: 1 ...", as the text of one node (`FailedAndUnresolvableNodes`): a text for
each node would cost it much more. So the text itself carries the counts. A full stop follows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpumgr.cluster.choose import Misfit
from gpumgr.cluster.request import ContainerRequest

MAX_CHARACTERS: Final = 300


@dataclass
class Group:
    """Nodes with one reason: `count` of them, and the one that lacks least."""

    count: int
    node: str
    misfit: Misfit


def explain(misfits: Iterable[tuple[str, Misfit]]) -> str:
    """From (node, misfit) of each node that was offered; there must be one."""
    groups: dict[tuple[ContainerRequest | None, bool], Group] = {}
    for node, misfit in misfits:
        group = groups.setdefault((misfit.container, misfit.not_offered), Group(0, node, misfit))
        group.count += 1
        if (misfit.distance, node) < (group.misfit.distance, group.node):
            group.node, group.misfit = node, misfit
    return explain_groups(groups.values())


def explain_groups(groups: Iterable[Group]) -> str:
    """There must be one."""
    ordered = sorted(groups, key=lambda group: (-group.count, group.node))
    total = sum(group.count for group in ordered)
    if total == 1:
        return _bounded(f"has {_reason(ordered[0].misfit)}{_closest(ordered[0], name_node=False)}")
    detailed = _joined(total, [(group, _closest(group)) for group in ordered])
    if len(detailed) <= MAX_CHARACTERS:
        return detailed
    best = min(ordered, key=lambda group: (group.misfit.distance, group.node))
    return _bounded(_joined(total, [(group, _closest(group) if group is best else "") for group in ordered]))


def _joined(total: int, groups: Iterable[tuple[Group, str]]) -> str:
    reasons = [
        f"{group.count} {'has' if group.count == 1 else 'have'} {_reason(group.misfit)}{closest}" for group, closest in groups
    ]
    return f"for the {total} nodes with enough in total: {', '.join(reasons)}"


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 4] + " ..."


def _reason(misfit: Misfit) -> str:
    container = misfit.container
    if container is None:
        return "no GPUs that gpumgr can use"
    if container.whole:
        memory = f" with {memory_text(container.memory_mebibytes)} in all" if container.memory_mebibytes else ""
        wanted = f"{container.gpus} entirely free GPUs" if container.gpus > 1 else "entirely free GPU"
        text = f"{'not' if container.gpus > 1 else 'no'} {wanted}{memory}"
    else:
        text = f"no GPU with {container.cores} free cores and {memory_text(container.memory_mebibytes)}"
    return f"{text} but for unhealthy or cordoned ones" if misfit.not_offered else text


def _closest(group: Group, *, name_node: bool = True) -> str:
    misfit = group.misfit
    if misfit.container is None:
        return ""
    place = f"{group.node[:63]}" if name_node else ""
    if misfit.container.whole:
        found = f"{misfit.free_gpus} free"
        return f" (closest: {place}, {found})" if place else f" ({found})"
    if misfit.closest is None:
        return ""
    gpu, room = misfit.closest
    where = f"{place} GPU {gpu}".strip()
    return f" (closest: {where}, {room.cores} cores and {memory_text(room.memory_mebibytes)})"


def memory_text(mebibytes: int) -> str:
    return f"{mebibytes / 1024:g} GiB" if mebibytes >= 1024 and mebibytes % 256 == 0 else f"{mebibytes} MiB"
