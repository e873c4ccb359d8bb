"""The topology with who sits where: the cost tree with what lies under each GPU, as text and as plain data."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpumgr.agent.writer import AgentView
from gpumgr.allocator.ids import Card
from gpumgr.allocator.ledger import Allocation
from gpumgr.topology.devices import Gpu
from gpumgr.topology.render import render_tree, tree_data
from gpumgr.units import CORES_PER_GPU, GpuName, Kind

_GPU_LINE: Final = re.compile(r"(?P<indent>(?:\|  |\|--)*)GPU(?P<index>[0-9]+):")


def graph_text(view: AgentView) -> str:
    """The tree as `gpumgr topology` prints it; under each GPU what is free, what is wrong, and its holders, oldest first.

    GPUs that the driver does not show now stand at the end.
    """
    gpus = {index: name for name, index in view.node.indices.items() if name in view.node.rows}
    lines: list[str] = []
    for line in render_tree(view.node.topology, _free_mask(view), _labels(view)).splitlines():
        lines.append(line)
        if (found := _GPU_LINE.match(line)) and (name := gpus.get(int(found["index"]))) is not None:
            indent = found["indent"].replace("|--", "|  ") + "   "
            lines += [indent + about for about in _about(view, name)]
    for card in _missing(view):
        lines.append(f"{view.node.label(card.name)} (not in the tree)")
        lines += ["   " + about for about in _about(view, card.name)]
    return "\n".join(lines) + "\n"


def graph_data(view: AgentView) -> dict[str, Any]:
    """The same as nested dictionaries: `tree` (each GPU's leaf has its facts under `gpu`), `missing`, versions of the driver."""
    gpus = {row: name for name, row in view.node.rows.items()}
    snapshot = view.inventory.snapshot
    return {
        "driver_version": snapshot.driver_version,
        "cuda_version": snapshot.cuda_version,
        "tree": _with_gpus(
            tree_data(view.node.topology, _free_mask(view), _labels(view)),
            lambda row: _facts(view, gpus[row]) if row in gpus else None,
        ),
        "missing": [_facts(view, card.name) for card in _missing(view)],
    }


def _with_gpus(node: dict[str, Any], facts: Callable[[int], dict[str, Any] | None]) -> dict[str, Any]:
    if node["name"].startswith("GPU"):
        return {**node, "gpu": facts(node["gpus"][0])}
    return {**node, "children": [_with_gpus(child, facts) for child in node["children"]]}


def _labels(view: AgentView) -> list[str]:
    """What the rows of the topology are called."""
    return [f"GPU{gpu.index}" for gpu in view.inventory.snapshot.gpus]


def _missing(view: AgentView) -> list[Card]:
    return [card for card in view.ledger.cards.cards if card.name not in view.node.rows]


def _free_mask(view: AgentView) -> int:
    """GPUs of which nobody holds anything and where something new may go."""
    cores, blocks = view.ledger.held("core"), view.ledger.held("memory")
    taken = {*cores, *blocks, *view.node.unfit}
    return sum(1 << row for name, row in view.node.rows.items() if name not in taken)


def _free(view: AgentView, card: Card) -> tuple[int, int]:
    """Cores and memory blocks that nobody holds; no blocks on a GPU that one container has whole."""
    cores = CORES_PER_GPU - view.ledger.held("core").get(card.name, 0).bit_count()
    blocks = card.memory_blocks - view.ledger.held("memory").get(card.name, 0).bit_count()
    return cores, 0 if card.name in view.ledger.exclusive else blocks


def _about(view: AgentView, name: GpuName) -> Iterator[str]:
    card = view.ledger.cards.by_name[name]
    gpu = _shown(view, name)
    cores, blocks = _free(view, card)
    model = f"{gpu.model}, " if gpu is not None and gpu.model else ""
    yield f"{model}{card.uuid}: {cores} of {CORES_PER_GPU} cores and {blocks} of {card.memory_blocks} memory blocks free"
    if (why := view.node.unfit.get(name)) is not None:
        yield f"takes nothing new: {why}"
    for holder in view.ledger.on(name):
        role = " (init)" if holder.init else ""
        yield f"{_who(holder)}{role}: {_held(holder, 'core', name)} cores, {_held(holder, 'memory', name)} memory blocks"


def _who(holder: Allocation) -> str:
    """namespace/pod/container, as far as it is known."""
    if holder.pod is None:
        return holder.describe()
    return "/".join((*holder.pod, holder.container) if holder.container else holder.pod)


def _held(holder: Allocation, kind: Kind, name: GpuName) -> int:
    return holder.held(kind).get(name, 0).bit_count()


def _facts(view: AgentView, name: GpuName) -> dict[str, Any]:
    card = view.ledger.cards.by_name[name]
    gpu = _shown(view, name)
    cores, blocks = _free(view, card)
    return {
        "uuid": card.uuid,
        "name": name,
        "row": view.node.rows.get(name),
        "index": view.node.indices.get(name),
        "minor": gpu.minor if gpu else None,
        "model": gpu.model if gpu else None,
        "bus_id": gpu.bus_id if gpu else None,
        "numa_node": gpu.numa_node if gpu else None,
        "cores_free": cores,
        "memory_blocks": card.memory_blocks,
        "memory_blocks_free": blocks,
        "takes_nothing_new": view.node.unfit.get(name),
        "holders": [_holder_facts(holder, name) for holder in view.ledger.on(name)],
    }


def _holder_facts(holder: Allocation, name: GpuName) -> dict[str, Any]:
    namespace, pod = holder.pod or (None, None)
    return {
        "allocation": holder.id,
        "namespace": namespace,
        "pod": pod,
        "uid": holder.uid,
        "container": holder.container,
        "init": holder.init,
        "cores": _held(holder, "core", name),
        "memory_blocks": _held(holder, "memory", name),
        "granted_at": holder.granted_at,
        "why": holder.why,
    }


def _shown(view: AgentView, name: GpuName) -> Gpu | None:
    row = view.node.rows.get(name)
    return None if row is None else view.inventory.snapshot.gpus[row]
