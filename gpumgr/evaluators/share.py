"""share: a part of one GPU, best fit. Source of the rule: README, "Placement rules".

binpack: of the GPUs with enough free cores and memory, the fewest free cores, then the fewest free memory blocks, then the lowest
index. spread: the most free cores, then the most free blocks, then the lowest index.
"""

from collections.abc import Sequence
from typing import Literal

from gpumgr.evaluators.capacity import GpuCapacity

Policy = Literal["binpack", "spread"]


def fits(gpu: GpuCapacity, cores: int, memory_blocks: int) -> bool:
    return gpu.cores_free >= cores and gpu.memory_blocks_free >= memory_blocks


def choose_shared(gpus: Sequence[GpuCapacity], cores: int, memory_blocks: int, policy: Policy) -> GpuCapacity | None:
    """The GPU that the share rule takes of `gpus`; None where none has the room."""
    sign = 1 if policy == "binpack" else -1
    return min(
        (gpu for gpu in gpus if fits(gpu, cores, memory_blocks)),
        key=lambda gpu: (sign * gpu.cores_free, sign * gpu.memory_blocks_free, gpu.index),
        default=None,
    )
