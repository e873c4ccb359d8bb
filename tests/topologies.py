"""Topologies as tests write them: rows of the cells of `nvidia-smi topo -m`."""

from collections.abc import Sequence

from gpumgr.placement.devices import Topology
from gpumgr.placement.matrix import parse_topology


def topology_from_matrix(rows: Sequence[Sequence[str]]) -> Topology:
    """Row i and column i are GPU i."""
    names = [f"GPU{row}" for row in range(len(rows))]
    lines = [names, *([name, *row] for name, row in zip(names, rows, strict=True))]
    return parse_topology("\n".join(map(" ".join, lines))).topology
