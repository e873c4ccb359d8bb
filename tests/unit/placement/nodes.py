"""Nodes and capacities for the evaluators' tests."""

from collections.abc import Callable, Collection

from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.select import GpuCapacity

BLOCKS = 320


def node(n: int, link: Callable[[int, int], tuple[Level, int]]) -> Topology:
    """A topology of n GPUs; `link(a, b)` gives level and NVLinks for a < b."""
    pairs = [[link(min(a, b), max(a, b)) if a != b else (Level.PSB, 0) for b in range(n)] for a in range(n)]
    return Topology(
        levels=tuple(tuple(level for level, _ in row) for row in pairs),
        nvlinks=tuple(tuple(links for _, links in row) for row in pairs),
    )


def capacities(n: int, occupied: Collection[int] = (), blocks: int = BLOCKS) -> list[GpuCapacity]:
    """n GPUs, those `occupied` with nothing free."""
    return [
        GpuCapacity(
            index=index,
            cores_free=0 if index in occupied else 100,
            memory_blocks_free=0 if index in occupied else blocks,
            entirely_free=index not in occupied,
        )
        for index in range(n)
    ]
