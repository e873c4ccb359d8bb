"""Renders the topology tree with the containers on each GPU, as text and as nested dictionaries."""

from collections.abc import Iterator
from typing import Any

from gpumgr.agent.api import container_row
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, RESOURCES, GpuName
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.tree import tree_data


def graph_text(view: AgentView) -> str:
    """The tree as `gpumgr topology` prints it. Under each GPU are its free amounts, why it takes nothing new, and its holders, oldest
    first. GPUs that the driver does not show are at the end."""
    lines = list(_lines(view, _tree(view), {row: name for name, row in view.node.rows.items()}))
    for gpu in view.ledger.gpu_registry.gpus:
        if gpu.name not in view.node.rows:
            lines.append(f"{view.node.label(gpu.name)} (not in the tree)")
            lines += ["   " + sentence for sentence in _sentences(view, gpu.name)]
    return "\n".join(lines) + "\n"


def graph_data(view: AgentView) -> dict[str, Any]:
    """`tree`, `gpus`, and the versions of driver and CUDA. A leaf of the tree is one GPU: its own key `gpus` has one number, the GPU's
    position (row) in the driver's list."""
    snapshot = view.inventory.snapshot
    return {
        "driver_version": snapshot.driver_version,
        "cuda_version": snapshot.cuda_version,
        "tree": _tree(view),
        "gpus": [
            {
                **_gpu(view, registered.name),
                "holders": [container_row(holder, registered.name, None) for holder in view.ledger.on(registered.name)],
            }
            for registered in view.ledger.gpu_registry.gpus
        ],
    }


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


def _gpu(view: AgentView, name: GpuName) -> dict[str, Any]:
    registered = view.ledger.gpu_registry.by_name[name]
    row = view.node.rows.get(name)
    gpu = None if row is None else view.inventory.snapshot.gpus[row]
    available = view.ledger.available(name)
    return {
        "uuid": registered.uuid,
        "name": name,
        "row": row,
        "index": view.node.indices.get(name),
        "model": gpu.model if gpu else None,
        "numa_node": gpu.numa_node if gpu else None,
        "cores_free": available.cores,
        "memory_blocks": registered.memory_blocks,
        "memory_blocks_free": available.memory_mebibytes // BLOCK_MEBIBYTES,
        "takes_nothing_new": view.node.out_of_service.get(name),
    }


def _sentences(view: AgentView, name: GpuName) -> Iterator[str]:
    gpu = _gpu(view, name)
    model = f"{gpu['model']}, " if gpu["model"] else ""
    memory = f"{gpu['memory_blocks_free']} of {gpu['memory_blocks']} memory blocks"
    yield f"{model}{gpu['uuid']}: {gpu['cores_free']} of {CORES_PER_GPU} cores and {memory} free"
    if gpu["takes_nothing_new"] is not None:
        yield f"takes nothing new: {gpu['takes_nothing_new']}"
    for holder in view.ledger.on(name):
        cores, blocks = (holder.held(resource).get(name, 0).bit_count() for resource in RESOURCES)
        yield f"{_holder_name(holder)}{' (init)' if holder.init else ''}: {cores} cores, {blocks} memory blocks"


def _holder_name(holder: Allocation) -> str:
    """namespace/pod/container as far as known, or else the pod's UID or the allocation's id."""
    if holder.pod is None:
        return f"pod uid {holder.uid}" if holder.uid else f"allocation {holder.id}"
    return "/".join((*holder.pod, *([holder.container] if holder.container else ())))
