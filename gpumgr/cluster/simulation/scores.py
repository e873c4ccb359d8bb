"""The reference policies as scores of nodes.

random, best-fit, dot-product, packing, clustering and fgd follow the published simulator of FGD (USENIX ATC '23): integers from 0 to 100,
computed from CPU and the sum of the free GPU-milli, which are relative to 128 CPUs and 8 GPUs.
"""

from collections.abc import Callable
from math import exp
from typing import Final

from gpumgr.cluster.simulation.fragmentation import Fragmentation
from gpumgr.cluster.simulation.model import GPU_MILLI, Gpus, Node, Shape

_CPU_SCALE: Final = 128_000
_GPU_SCALE: Final = 8_000

#: The GPUs of a node for a request that fits.
Choice = Callable[[Node, Shape], Gpus]


def none(_node: Node, _shape: Shape) -> float:
    """All nodes are equal."""
    return 0


def best_fit(node: Node, shape: Shape) -> float:
    cpu = (node.cpu_milli - shape.cpu_milli) / _CPU_SCALE
    gpu = (node.free_milli - shape.total_milli) / _GPU_SCALE
    return int((1 - cpu / 2 - gpu / 2) * 100)


def dot_product(node: Node, shape: Shape) -> float:
    cpu = node.cpu_milli / _CPU_SCALE * shape.cpu_milli / _CPU_SCALE
    gpu = node.free_milli / _GPU_SCALE * shape.total_milli / _GPU_SCALE
    return int((1 - (cpu + gpu) / 2) * 100)


def clustering(node: Node, shape: Shape) -> float:
    """Prefers nodes that have pods of the same kind: these only, then among others, then no pods with GPUs, then other kinds."""
    if not shape.gpus:
        return 0
    kinds = {kind for kind, count in node.kinds.items() if count and kind != "none"}
    level = (3 if len(kinds) == 1 else 2) if shape.kind in kinds else (0 if kinds else 1)
    return 25 * level + 25 * (_GPU_SCALE - node.free_milli) // _GPU_SCALE


def packing(node: Node, shape: Shape) -> float:
    """Prefers shared GPUs, then idle GPUs of nodes in use, then idle nodes."""
    if not shape.gpus:
        return 0
    idle = len(node.idle_gpus())
    if idle == len(node.gpu_milli):
        return max(33 - idle, idle)
    taken = [node.gpu_milli[gpu] for gpu in node.tightest(shape)]
    fresh = taken.count(GPU_MILLI)
    return max(50 - fresh, 33) if fresh else max(100 - sum(each // 10 for each in taken) // 10, 50)


class Fgd:
    """The node, and for a share the GPU, on which fragmentation grows least."""

    def __init__(self, fragmentation: Fragmentation) -> None:
        self._fragmentation = fragmentation

    def score(self, node: Node, shape: Shape) -> float:
        return self._best(node, shape)[0]

    def choice(self, node: Node, shape: Shape) -> Gpus:
        return self._best(node, shape)[1]

    def _best(self, node: Node, shape: Shape) -> tuple[int, Gpus]:
        if not shape.share:
            gpus = node.tightest(shape)
            return self._scored(node, shape, gpus), gpus
        first: dict[int, int] = {}
        for gpu in node.sharable(shape):
            first.setdefault(node.gpu_milli[gpu], gpu)
        return max(
            ((self._scored(node, shape, (gpu,)), (gpu,)) for gpu in first.values()), key=lambda pair: (pair[0], -pair[1][0])
        )

    def _scored(self, node: Node, shape: Shape, gpus: Gpus) -> int:
        after = list(node.gpu_milli)
        for gpu in gpus:
            after[gpu] -= shape.gpu_milli
        less = self._fragmentation.of(node) - self._fragmentation.amount(node.spec.model, node.cpu_milli - shape.cpu_milli, after)
        return int(100 / (1 + exp(-less / 1000)))
