"""Renders the topology tree, with the containers that hold each GPU, as text and as nested dictionaries."""

from collections.abc import Iterator
from typing import Any

from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, GpuName
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.topology.tree import tree_data


def graph_text(view: AgentView) -> str:
    """The tree as `gpumgr topology` prints it; under each GPU its free amounts, why it takes nothing new, and its holders, oldest first.

    GPUs that the driver does not show are at the end.
    """
    lines = list(_lines(view, _tree(view)))
    for gpu in _missing(view):
        lines.append(f"{view.node.label(gpu.name)} (not in the tree)")
        lines += ["   " + sentence for sentence in _sentences(_gpu_data(view, gpu.name))]
    return "\n".join(lines) + "\n"


def graph_data(view: AgentView) -> dict[str, Any]:
    """The same as nested dictionaries: `tree` (each leaf has its GPU under `gpu`), `missing`, and the versions of driver and CUDA."""
    snapshot = view.inventory.snapshot
    return {
        "driver_version": snapshot.driver_version,
        "cuda_version": snapshot.cuda_version,
        "tree": _tree(view),
        "missing": [_gpu_data(view, gpu.name) for gpu in _missing(view)],
    }


def _lines(view: AgentView, node: dict[str, Any], depth: int = 0) -> Iterator[str]:
    indent = "|  " * (depth - 1) + "|--" if depth else ""
    yield f"{indent}{node['name']}:{node['free']}:{node['cost']}"
    if node.get("gpu") is not None:
        yield from ("|  " * depth + "   " + sentence for sentence in _sentences(node["gpu"]))
    for child in node.get("children", ()):
        yield from _lines(view, child, depth + 1)


def _tree(view: AgentView) -> dict[str, Any]:
    cores, blocks = view.ledger.held("core"), view.ledger.held("memory")
    taken = {*cores, *blocks, *view.node.out_of_service}
    free = sum(1 << row for name, row in view.node.rows.items() if name not in taken)
    labels = [f"GPU{gpu.index}" for gpu in view.inventory.snapshot.gpus]
    return _with_gpus(view, tree_data(view.node.topology, free, labels), {row: name for name, row in view.node.rows.items()})


def _with_gpus(view: AgentView, node: dict[str, Any], names: dict[int, GpuName]) -> dict[str, Any]:
    if node["name"].startswith("GPU"):
        name = names.get(node["gpus"][0])
        return {**node, "gpu": None if name is None else _gpu_data(view, name)}
    return {**node, "children": [_with_gpus(view, child, names) for child in node["children"]]}


def _missing(view: AgentView) -> list[RegisteredGpu]:
    return [gpu for gpu in view.ledger.gpu_registry.gpus if gpu.name not in view.node.rows]


def _gpu_data(view: AgentView, name: GpuName) -> dict[str, Any]:
    registered = view.ledger.gpu_registry.by_name[name]
    row = view.node.rows.get(name)
    gpu = None if row is None else view.inventory.snapshot.gpus[row]
    available = view.ledger.available(name)
    return {
        "uuid": registered.uuid,
        "name": name,
        "row": row,
        "index": view.node.indices.get(name),
        "minor": gpu.minor if gpu else None,
        "model": gpu.model if gpu else None,
        "bus_id": gpu.bus_id if gpu else None,
        "numa_node": gpu.numa_node if gpu else None,
        "cores_free": available.cores,
        "memory_blocks": registered.memory_blocks,
        "memory_blocks_free": available.memory_mebibytes // BLOCK_MEBIBYTES,
        "takes_nothing_new": view.node.out_of_service.get(name),
        "holders": [_holder_data(holder, name) for holder in view.ledger.on(name)],
    }


def _holder_data(holder: Allocation, name: GpuName) -> dict[str, Any]:
    namespace, pod = holder.pod or (None, None)
    return {
        "allocation": holder.id,
        "namespace": namespace,
        "pod": pod,
        "uid": holder.uid,
        "container": holder.container,
        "init": holder.init,
        "cores": holder.held("core").get(name, 0).bit_count(),
        "memory_blocks": holder.held("memory").get(name, 0).bit_count(),
        "granted_at": holder.granted_at,
        "why": holder.why,
    }


def _sentences(gpu: dict[str, Any]) -> Iterator[str]:
    model = f"{gpu['model']}, " if gpu["model"] else ""
    memory = f"{gpu['memory_blocks_free']} of {gpu['memory_blocks']} memory blocks"
    yield f"{model}{gpu['uuid']}: {gpu['cores_free']} of {CORES_PER_GPU} cores and {memory} free"
    if gpu["takes_nothing_new"] is not None:
        yield f"takes nothing new: {gpu['takes_nothing_new']}"
    for holder in gpu["holders"]:
        role = " (init)" if holder["init"] else ""
        yield f"{_holder_name(holder)}{role}: {holder['cores']} cores, {holder['memory_blocks']} memory blocks"


def _holder_name(holder: dict[str, Any]) -> str:
    """namespace/pod/container, as far as they are known, or else the pod's UID or the allocation's id."""
    if holder["pod"] is None:
        return f"pod uid {holder['uid']}" if holder["uid"] else f"allocation {holder['allocation']}"
    return "/".join(part for part in (holder["namespace"], holder["pod"], holder["container"]) if part)
