"""Sums over the GPUs of a node, for people and metrics: what is used, what is free, and which free amounts no pod can get."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from gpumgr.cluster.core.node import GpuState, NodeState, Used
from gpumgr.cluster.core.request import NOTHING
from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.placement.evaluators.mig import has_place

#: (what is counted: "gpus", "cores" or "memory" in MiB; model; its part, see PARTS or GPU_PARTS) -> amount.
Totals = Counter[tuple[str, str, str]]

#: "free": on entirely free GPUs. "partial": free on partly used GPUs. "stranded": free on full GPUs (see GPU_PARTS), so no pod can get it.
#: "closed": free on GPUs that are unhealthy or cordoned.
PARTS: Final = ("used", "free", "partial", "stranded", "closed")
#: States of whole GPUs; "full": it has no free cores, or no free memory, or no place for a MIG device.
GPU_PARTS: Final = ("free", "partial", "full", "closed")


def summarize(node: NodeState, used: Used) -> tuple[Totals, Amounts]:
    """The totals, and what is free on all offered GPUs together, which is what kube-scheduler alone would count."""
    totals = Totals()
    for gpu, held in zip(node.gpus, used, strict=True):
        free = _free(gpu, held)
        part = _part(gpu, held, free)
        totals["gpus", gpu.model, part] += 1
        for each, amounts in (("used", held), ("stranded" if part == "full" else part, free)):
            totals["cores", gpu.model, each] += amounts.cores
            totals["memory", gpu.model, each] += amounts.memory_mebibytes
    return totals, free_sum(zip(node.gpus, used, strict=True))


def free_sum(gpus: Iterable[tuple[GpuState, Amounts]]) -> Amounts:
    """The sum of what is free on the offered GPUs. `gpus`: pairs of a GPU and what is used of it."""
    return sum((_free(gpu, held) for gpu, held in gpus if gpu.offered), NOTHING)


def _free(gpu: GpuState, held: Amounts) -> Amounts:
    return Amounts(max(0, CORES_PER_GPU - held.cores), max(0, gpu.memory_mebibytes - held.memory_mebibytes))


def _part(gpu: GpuState, held: Amounts, free: Amounts) -> str:
    if not gpu.offered:
        return "closed"
    if held == NOTHING:
        return "free"
    if gpu.mig and not has_place(gpu.mig, held.slices):
        return "full"
    return "partial" if free.cores and free.memory_mebibytes else "full"


def covers(sums: Amounts, wanted: Amounts) -> bool:
    return sums.cores >= wanted.cores and sums.memory_mebibytes >= wanted.memory_mebibytes


def frontier(sums: Iterable[Amounts]) -> tuple[Amounts, ...]:
    """The sums that no other sum covers. A request that none of them covers is too large for every node."""
    best: list[Amounts] = []
    for each in sorted(set(sums), key=lambda each: (-each.cores, -each.memory_mebibytes)):
        if not best or each.memory_mebibytes > best[-1].memory_mebibytes:
            best.append(each)
    return tuple(best)
