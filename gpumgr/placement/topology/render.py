"""Renders the topology: the cost tree and the matrix, as text and as plain data."""

from collections.abc import Sequence
from typing import Any

from gpumgr.placement.topology.devices import Topology
from gpumgr.placement.topology.matrix import cell_text
from gpumgr.placement.topology.tree import Group, access_costs, build_tree, indices


def render_tree(topology: Topology, free: int | None = None, labels: Sequence[str] | None = None) -> str:
    """`NAME:free GPUs:access cost`, one node a line, children under their group.

    `free` is a mask of entirely free GPUs, None = all of them; `labels` name the GPUs, None = GPU<row>.
    """
    return "\n".join(_lines(tree_data(topology, free, labels), 0))


def tree_data(topology: Topology, free: int | None = None, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """The same tree as nested dictionaries: name, gpus, free, cost, children."""
    root = build_tree(topology)
    names = [f"GPU{row}" for row in range(len(topology))] if labels is None else labels
    return _node_data(root, root.mask if free is None else free, access_costs(root), names)


def matrix_cells(topology: Topology) -> list[list[str]]:
    """Rows of cells that `topology_from_matrix` reads back."""
    n = len(topology)
    return [["X" if a == b else cell_text(topology.link(a, b)) for b in range(n)] for a in range(n)]


def render_matrix(topology: Topology, labels: Sequence[str], numa_nodes: Sequence[int | None] = ()) -> str:
    """The matrix in the manner of `nvidia-smi topo -m`, in columns of equal width; with `numa_nodes`, a NUMA Affinity column."""
    table = [["", *labels], *([label, *row] for label, row in zip(labels, matrix_cells(topology), strict=True))]
    if any(node is not None for node in numa_nodes):
        column = ["NUMA Affinity", *("N/A" if node is None else str(node) for node in numa_nodes)]
        table = [[*row, value] for row, value in zip(table, column, strict=True)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def _lines(node: dict[str, Any], depth: int) -> list[str]:
    indent = "|  " * (depth - 1) + "|--" if depth else ""
    lines = [f"{indent}{node['name']}:{node['free']}:{node['cost']}"]
    for child in node["children"]:
        lines += _lines(child, depth + 1)
    return lines


def _node_data(node: Group | int, free: int, costs: dict[int, int], names: Sequence[str]) -> dict[str, Any]:
    if isinstance(node, int):
        return {"name": names[node], "gpus": [node], "free": free >> node & 1, "cost": costs[node], "children": []}
    return {
        "name": node.name,
        "gpus": list(indices(node.mask)),
        "free": (node.mask & free).bit_count(),
        "cost": 0,
        "children": [_node_data(child, free, costs, names) for child in node.children],
    }
