"""Renders the topology tree, with the containers that hold each GPU, as text."""

from collections.abc import Iterator
from typing import Any

from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, RESOURCES, GpuName
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.topology.tree import tree_data


def graph_text(view: AgentView) -> str:
    """The tree as `gpumgr topology` prints it; under each GPU its free amounts, why it takes nothing new, and its holders, oldest first.

    GPUs that the driver does not show are at the end.
    """
    lines = list(_lines(view, _tree(view), {row: name for name, row in view.node.rows.items()}))
    for gpu in view.ledger.gpu_registry.gpus:
        if gpu.name not in view.node.rows:
            lines.append(f"{view.node.label(gpu.name)} (not in the tree)")
            lines += ["   " + sentence for sentence in _sentences(view, gpu.name)]
    return "\n".join(lines) + "\n"


def _lines(view: AgentView, node: dict[str, Any], names: dict[int, GpuName], depth: int = 0) -> Iterator[str]:
    indent = "|  " * (depth - 1) + "|--" if depth else ""
    yield f"{indent}{node['name']}:{node['free']}:{node['cost']}"
    if node["name"].startswith("GPU") and (name := names.get(node["gpus"][0])) is not None:
        yield from ("|  " * depth + "   " + sentence for sentence in _sentences(view, name))
    for child in node["children"]:
        yield from _lines(view, child, names, depth + 1)


def _tree(view: AgentView) -> dict[str, Any]:
    cores, blocks = view.ledger.held("core"), view.ledger.held("memory")
    taken = {*cores, *blocks, *view.node.out_of_service}
    free = sum(1 << row for name, row in view.node.rows.items() if name not in taken)
    return tree_data(view.node.topology, free, [f"GPU{gpu.index}" for gpu in view.inventory.snapshot.gpus])


def _sentences(view: AgentView, name: GpuName) -> Iterator[str]:
    registered, row, available = view.ledger.gpu_registry.by_name[name], view.node.rows.get(name), view.ledger.available(name)
    model = None if row is None else view.inventory.snapshot.gpus[row].model
    memory = f"{available.memory_mebibytes // BLOCK_MEBIBYTES} of {registered.memory_blocks} memory blocks"
    yield f"{f'{model}, ' if model else ''}{registered.uuid}: {available.cores} of {CORES_PER_GPU} cores and {memory} free"
    if (why := view.node.out_of_service.get(name)) is not None:
        yield f"takes nothing new: {why}"
    for holder in view.ledger.on(name):
        cores, blocks = (holder.held(resource).get(name, 0).bit_count() for resource in RESOURCES)
        yield f"{_holder_name(holder)}{' (init)' if holder.init else ''}: {cores} cores, {blocks} memory blocks"


def _holder_name(holder: Allocation) -> str:
    """namespace/pod/container, as far as they are known, or else the pod's UID or the allocation's id."""
    if holder.pod is None:
        return f"pod uid {holder.uid}" if holder.uid else f"allocation {holder.id}"
    return "/".join((*holder.pod, *([holder.container] if holder.container else ())))
