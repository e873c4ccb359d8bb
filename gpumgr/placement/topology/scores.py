"""The scores of the links between two GPUs and within a set. Source of the numbers: docs/user-guide.md, "Placement".

SYS 10, NODE 20, PHB 30, PXB 40, PIX 50, PSB 60 (the values of `Level`), plus 100 for each NVLink between the two.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Final

from gpumgr.placement.topology.devices import Topology

NVLINK_SCORE: Final = 100

#: n x n pair scores; symmetric, the diagonal is 0.
Scores = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def score_matrix(topology: Topology) -> Scores:
    """The score of every pair of GPUs."""
    n = len(topology)
    return tuple(
        tuple(0 if a == b else int(topology.levels[a][b]) + NVLINK_SCORE * topology.nvlinks[a][b] for b in range(n))
        for a in range(n)
    )


def set_score(scores: Scores, gpus: Sequence[int]) -> int:
    """Sum over the pairs of a set; a set of one scores 0."""
    return sum(scores[a][b] for a, b in combinations(gpus, 2))
