"""The topology tree: groups of GPUs for each PCIe level. Also renders the tree and the matrix as text and data.

A group at level L is a connected component of the graph in which an edge joins two GPUs at level L or closer. A group has at least two
children: if a closer level joins all its GPUs, only the group of the closer level is in the tree. The root is always in the tree, even
above a single group. NVLinks do not affect the tree.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import msgspec

from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.matrix import cell_text


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are joined at `level` or closer (None: the root). `mask` has a bit for each GPU index. Children (smaller groups or GPU
    indices) are in the order of their lowest index."""

    level: Level | None
    mask: int
    children: tuple["Group | int", ...]

    @property
    def name(self) -> str:
        return "ROOT" if self.level is None else self.level.name


@lru_cache(maxsize=64)
def build_tree(topology: Topology) -> Group:
    nodes: list[Group | int] = list(range(len(topology)))
    for level in sorted(Level, reverse=True):
        nodes = [_joined(level, family) for family in _families(topology, nodes, level)]
    return Group(level=None, mask=_union(nodes), children=tuple(nodes))


def groups_smallest_first(root: Group) -> tuple[Group, ...]:
    """All groups below the root, each after the groups inside it."""
    found: list[Group] = []
    for child in root.children:
        if isinstance(child, Group):
            found += [*groups_smallest_first(child), child]
    return tuple(found)


def enclosing_group(root: Group, mask: int) -> Group:
    """The smallest group with every GPU of `mask`."""
    for child in root.children:
        if isinstance(child, Group) and child.mask & mask == mask:
            return enclosing_group(child, mask)
    return root


def fragment_choice(root: Group, free: int, eligible: int) -> int | None:
    """The GPU for a request of one whole GPU, by the fragment rule; None: no GPU is eligible. `free` and `eligible` are masks, and each
    eligible GPU is free.

    Fragment rule: the search begins at the root, and goes down to a single GPU. Among the children with an eligible GPU it chooses the one
    with the fewest free GPUs; on a tie, the one with the lowest free index.
    """
    node: Group | int = root
    while isinstance(node, Group):
        open_children = [child for child in node.children if _mask(child) & eligible]
        if not open_children:
            return None
        node = min(open_children, key=lambda child: _fewest_first(_mask(child) & free))
    return node


def fragment_order(root: Group) -> dict[int, int]:
    """GPU -> its position, from 1, in the order in which the fragment rule takes the GPUs of an empty node."""
    free, turns = root.mask, dict[int, int]()
    while (gpu := fragment_choice(root, free, free)) is not None:
        turns[gpu] = len(turns) + 1
        free ^= 1 << gpu
    return turns


def access_costs(root: Group) -> dict[int, int]:
    """GPU -> its access cost: the rank, from 1, of the group that has the GPU as a child. On an empty node the fragment rule uses up the
    group with rank 1 first. If one GPU uses up two groups, one inside the other, both have the same rank."""
    parents = [group for group in (root, *groups_smallest_first(root)) if any(isinstance(child, int) for child in group.children)]
    turns = fragment_order(root)
    used_up = [max(turns[gpu] for gpu in indices(group.mask)) for group in parents]
    rank = {turn: position for position, turn in enumerate(sorted(set(used_up)), start=1)}
    costs: dict[int, int] = {}
    for group, turn in zip(parents, used_up, strict=True):
        costs |= {child: rank[turn] for child in group.children if isinstance(child, int)}
    return costs


def indices(mask: int) -> tuple[int, ...]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)


def mask_of(gpus: tuple[int, ...]) -> int:
    return sum(1 << gpu for gpu in set(gpus))


def _families(topology: Topology, nodes: list[Group | int], level: Level) -> list[list[Group | int]]:
    """Sorts tree nodes into families: the nodes of a family have GPUs that are joined at `level` or closer."""
    families: list[list[Group | int]] = []
    for node in nodes:
        near = _near(topology, _mask(node), level)
        joined = [family for family in families if _union(family) & near]
        merged = [member for family in joined for member in family]
        families = [family for family in families if family not in joined]
        families.append([*merged, node])
    return families


def _near(topology: Topology, mask: int, level: Level) -> int:
    members = indices(mask)
    return mask_of(tuple(b for b in range(len(topology)) for a in members if a != b and topology.levels[a][b] >= level))


def _joined(level: Level, family: list[Group | int]) -> Group | int:
    if len(family) == 1:
        return family[0]
    family = sorted(family, key=lambda node: _fewest_first(_mask(node))[1])
    return Group(level=level, mask=_union(family), children=tuple(family))


def _mask(node: Group | int) -> int:
    return node.mask if isinstance(node, Group) else 1 << node


def _union(nodes: list[Group | int]) -> int:
    return reduce(or_, map(_mask, nodes), 0)


def _fewest_first(mask: int) -> tuple[int, int]:
    """Sort key: the number of GPUs, then the lowest one."""
    return mask.bit_count(), mask & -mask


def render_tree(topology: Topology, free: int | None = None, labels: Sequence[str] | None = None) -> str:
    """The tree with one line for each group and GPU, `NAME:free GPUs:access cost` (0 for a group); children are under their group. `free`:
    mask of entirely free GPUs, None = all; `labels`: the GPUs' names, None = GPU<row>."""
    return "\n".join(_lines(tree_data(topology, free, labels), 0))


def tree_data(topology: Topology, free: int | None = None, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """The tree as nested dictionaries: name, gpus, free, cost, children."""
    root = build_tree(topology)
    names = [f"GPU{row}" for row in range(len(topology))] if labels is None else labels
    return _node_data(root, root.mask if free is None else free, access_costs(root), names)


def matrix_cells(topology: Topology) -> list[list[str]]:
    """Rows of cells: X, the level, or NVn+level for n NVLinks."""
    n = len(topology)
    return [["X" if a == b else cell_text(topology.link(a, b)) for b in range(n)] for a in range(n)]


def render_matrix(topology: Topology, labels: Sequence[str], numa_nodes: Sequence[int | None] = ()) -> str:
    """`matrix_cells` in aligned columns, like `nvidia-smi topo -m`; with known `numa_nodes` also a column NUMA Affinity."""
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
