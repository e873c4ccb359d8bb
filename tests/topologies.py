"""Topologies from matrices of cells as `nvidia-smi topo -m` prints them: X, a PCIe level, NVn (level SYS) or NVn+LEVEL."""

from collections.abc import Sequence

from gpumgr.placement.topology.devices import Level, Link, Topology


def topology_from_matrix(rows: Sequence[Sequence[str]]) -> Topology:
    """Row i and column i are GPU i."""
    links = [[_link(cell) for cell in row] for row in rows]
    assert all(links[a][b] == links[b][a] for a in range(len(rows)) for b in range(len(rows)))
    return Topology(
        levels=tuple(tuple(link.level for link in row) for row in links),
        nvlinks=tuple(tuple(link.nvlinks for link in row) for row in links),
    )


def _link(cell: str) -> Link:
    if not cell.startswith("NV"):
        return Link(level=Level.PSB if cell == "X" else Level[cell])
    nvlinks, _, level = cell.removeprefix("NV").partition("+")
    return Link(level=Level[level or "SYS"], nvlinks=int(nvlinks))
