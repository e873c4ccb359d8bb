"""The request of a container that uses HAMi's resources. Pure."""

from math import ceil
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import CORES_PER_GPU, Amounts

#: HAMi's own bound. A larger number is probably a quantity in bytes, such as 16Gi.
_MOST_MEBIBYTES: Final = 2**31 - 1

_ALL_PERCENT: Final = 100

#: (memory factor, core factor), for oversubscription: requests of HAMi's resources are counted as if a GPU had so many times its memory and
#: cores.
Scaling = tuple[float, float]


class ReplicaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as in HAMi: `count` GPUs, and the same amounts of each. `cores` 0: no limit of cores.

    `memory_mebibytes` None: `memory_percent` of the GPU's memory. A GPU is charged with the memory that the container may use divided by
    `memory_scaling`, and with the cores divided by `core_scaling`.

    `memory_on`: UUID -> the MiB that another scheduler has granted for this percentage on that GPU; it may have taken the percentage of the
    free memory. These MiB are the container's limit.
    """

    count: int
    cores: int = 0
    memory_mebibytes: int | None = None
    memory_percent: int = 100
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    memory_on: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        memory = f"{self.memory_percent} % of the memory" if self.memory_mebibytes is None else f"{self.memory_mebibytes} MiB"
        each = "whole" if self.whole else f"with {memory}" + (f" and {self.cores} cores" if self.cores else "")
        return f"{self.count} GPU{'s' * (self.count > 1)} {each}"

    @property
    def whole(self) -> bool:
        return self.cores >= CORES_PER_GPU

    @property
    def problem(self) -> str | None:
        """Why no node can grant the request; None if some node may."""
        for percent, name, part in ((self.cores, "gpucores", "cores"), (self.memory_percent, "gpumem-percentage", "memory")):
            if not 0 <= percent <= _ALL_PERCENT:
                return f"{percent} % of the {part} of each GPU requested: {name} must be 0 to 100; ask for more GPUs instead"
        if self.memory_mebibytes is not None and self.memory_mebibytes > _MOST_MEBIBYTES:
            return f"{self.memory_mebibytes} MiB of memory requested: the number is in MiB, so that 16 GiB are 16384 and not 16Gi"
        return None

    def scaled(self, scaling: Scaling | None) -> "ReplicaRequest":
        """The request on a GPU with these factors; None: with the request's own factors."""
        return self if scaling is None else replace(self, memory_scaling=scaling[0], core_scaling=scaling[1])

    def counted(self, gpu_mebibytes: int, uuid: str = "") -> Amounts:
        """What the request takes of a GPU with `gpu_mebibytes`; all of a GPU that is granted whole."""
        limit = self.limit(gpu_mebibytes, uuid)
        if limit.whole:
            return limit
        return Amounts(ceil(limit.cores / self.core_scaling), ceil(limit.memory_mebibytes / self.memory_scaling))

    def limit(self, gpu_mebibytes: int, uuid: str = "") -> Amounts:
        """What the container may use of the GPU. A request for all memory of a GPU without reported memory (0) gets the whole GPU."""
        all_memory = self.memory_mebibytes is None and self.memory_percent >= _ALL_PERCENT
        if self.whole or (all_memory and not gpu_mebibytes):
            return Amounts(CORES_PER_GPU, gpu_mebibytes)
        if self.memory_mebibytes is not None:
            return Amounts(self.cores, self.memory_mebibytes)
        # HAMi's scheduler accepts more than 100 %, and grants 100 %.
        part = int(gpu_mebibytes * self.memory_scaling) * min(self.memory_percent, _ALL_PERCENT) // 100
        return Amounts(self.cores, min(part, dict(self.memory_on).get(uuid, part)))
