"""The fragmentation of a node: the free GPU-milli (thousandths of a GPU) that a typical pod can't use, on average.

Source: FGD, "Beware of Fragmentation" (USENIX ATC '23). Typical pods have the most popular requests, which make up 95 % of the trace. A pod
that fits can't use GPUs on which less is free than the pod requests. A pod that does not fit, or requests no GPU, can't use any GPU. GPU
memory and RAM do not count.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.simulation.model import GPU_MILLI, Node, Shape

_POPULARITY: Final = 0.95
_TABLES: Final = 1 << 16


def typical_shapes(shapes: Iterable[Shape]) -> list[tuple[Shape, float]]:
    """Requests with their weights, which sum up to 1; the most popular one first."""
    counts = Counter(replace(each, memory_blocks=0, ram_mebibytes=0) for each in shapes)
    ordered = sorted(
        counts.items(), key=lambda pair: (-pair[1], pair[0].cpu_milli, pair[0].gpus, pair[0].gpu_milli, repr(pair[0]))
    )
    chosen: list[tuple[Shape, int]] = []
    total, enough = 0, _POPULARITY * counts.total()
    for shape, count in ordered:
        if total >= enough:
            break
        chosen.append((shape, count))
        total += count
    return [(shape, count / total) for shape, count in chosen]


class Fragmentation:
    """`typical`: requests with their weights."""

    def __init__(self, typical: Sequence[tuple[Shape, float]]) -> None:
        self._typical = typical
        self._cpus = sorted({shape.cpu_milli for shape, _ in typical})
        self._table = lru_cache(maxsize=_TABLES)(self._computed)

    def of(self, node: Node) -> float:
        return self.amount(node.spec.model, node.cpu_milli, node.gpu_milli)

    def amount(self, model: str, cpu_milli: int, gpu_milli: Iterable[int]) -> float:
        """GPU-milli that can't be used on a node of this model with these free amounts."""
        return self._table(model, tuple(sorted(gpu_milli)))[bisect_right(self._cpus, cpu_milli)]

    def _computed(self, model: str, gpu_milli: tuple[int, ...]) -> list[float]:
        """Element n is the amount for a node that has enough CPUs for only the n lowest CPU requests."""
        free, idle = sum(gpu_milli), sum(each == GPU_MILLI for each in gpu_milli)
        drops = dict.fromkeys(self._cpus, 0.0)
        for shape, weight in self._typical:
            room = bool(gpu_milli) and gpu_milli[-1] >= shape.gpu_milli if shape.share else idle >= shape.gpus
            if shape.gpus and room and shape.constraints.allows("", model):
                drops[shape.cpu_milli] += weight * (free - sum(each for each in gpu_milli if each < shape.gpu_milli))
        amounts = [float(free)]
        for cpu in self._cpus:
            amounts.append(amounts[-1] - drops[cpu])
        return amounts
