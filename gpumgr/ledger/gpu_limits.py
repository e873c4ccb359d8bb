"""How strongly the limits of new shares are enforced on each GPU, and by which mechanism. Pure.

hard: the driver or the MPS daemon enforces the limit for all processes of the container together, and a container that does not run as
root can't exceed it. soft: a library enforces it, or a limit for each process; a program can exceed or avoid it, which gpumgr reports.
none: no limit.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from gpumgr.common.units import RESOURCES, Resource
from gpumgr.placement.topology.devices import Gpu
from gpumgr.placement.topology.labels import capability_of

Strength = Literal["hard", "soft", "none"]
#: Mechanism -> what it limits, and how strongly.
Strengths = Mapping[str, Mapping[Resource, Strength]]

#: Mechanism -> how well it limited cores in a measurement; docs/benchmarks.md has the tables.
_MEASURED_CORES: Final[Mapping[str, str]] = {
    "limiter": "limiter at 25 and 75 cores held 24.9 and 72.9 % of the GPU's time (H200, driver 580.159.04, 2026-11-27)",
    "mps": "mps at 25 and 75 cores gave 24.6 and 69 % of an unlimited rate of matrix products (H200, driver 580.159.04, protocol 2, "
    "2026-11-26)",
    "hami-core": "hami-core limited small kernels only, not matrix products, graphs and copies (H200, driver 580.159.04, HAMi-core "
    "5091a2f, 2026-11-26)",
}
#: Mechanisms that do not work on a GPU in MIG mode. Source: NVIDIA's MPS documentation r615.
_NOT_WITH_MIG: Final = ("limiter", "mps", "nvml-memory")
_VOLTA: Final = (7, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """How cores and memory of new shares are limited on a GPU.

    `cores_by` and `memory_by`: the mechanism that new shares get ("": none). A mechanism with the strength "none" does not work on this
    GPU or on this node.
    """

    cores: Strength = "none"
    cores_by: str = ""
    memory: Strength = "none"
    memory_by: str = ""

    def __str__(self) -> str:
        return f"memory {_text(self.memory, self.memory_by)}, cores {_text(self.cores, self.cores_by)}"


def gpu_limits(gpu: Gpu, mechanisms: Sequence[str], strengths: Strengths, broken: Collection[str]) -> GpuLimits:
    """`mechanisms`: the mechanisms of the node; the first one that limits a resource is chosen. `broken`: the unusable ones."""
    by: dict[Resource, str] = {
        kind: next((name for name in mechanisms if strengths.get(name, {}).get(kind, "none") != "none"), "") for kind in RESOURCES
    }
    found: dict[Resource, Strength] = {
        kind: strengths[name][kind] if name and name not in broken and _works_on(gpu, name) else "none"
        for kind, name in by.items()
    }
    return GpuLimits(cores=found["core"], cores_by=by["core"], memory=found["memory"], memory_by=by["memory"])


def describe_limits(limits: Iterable[tuple[int, GpuLimits]]) -> str:
    """`limits`: (NVML's index, limits) of each GPU. The text lists GPUs with equal limits together, then what was measured about limits of
    cores: "GPU 0-7: memory hard (nvml-memory), cores soft (mps); measured: ..."."""
    groups: dict[GpuLimits, list[int]] = {}
    for index, each in limits:
        groups.setdefault(each, []).append(index)
    by = dict.fromkeys(each.cores_by for each in groups if each.cores != "none")
    measured = [f"measured: {_MEASURED_CORES[name]}" for name in by if name in _MEASURED_CORES]
    return "; ".join([*(f"GPU {','.join(_ranges(sorted(indices)))}: {each}" for each, indices in groups.items()), *measured])


def _works_on(gpu: Gpu, mechanism: str) -> bool:
    """A GPU of a model that is not in the table counts as Volta or newer."""
    if mechanism in _NOT_WITH_MIG and gpu.mig_enabled:
        return False
    return mechanism != "mps" or (capability_of(gpu.model) or _VOLTA) >= _VOLTA


def _text(strength: Strength, by: str) -> str:
    if strength == "none":
        return f"none ({by} can't be used)" if by else "none"
    return f"{strength} ({by})"


def _ranges(indices: Sequence[int]) -> Iterator[str]:
    """Ascending numbers as ranges: 0-3, 5."""
    first = indices[0]
    for this, following in (*pairwise(indices), (indices[-1], None)):
        if following != this + 1:
            yield str(first) if first == this else f"{first}-{this}"
            first = following or 0
