"""Allocations as tests write them: by the ids that a container holds."""

from collections.abc import Iterable
from typing import Any

from gpumgr.common.units import BLOCK_MEBIBYTES, GpuName
from gpumgr.ledger.ids import NO_IDS, GpuRegistry, Masks, RegisteredGpu, count
from gpumgr.ledger.ledger import Allocation


def allocated(
    *,
    cores: Masks = NO_IDS,
    blocks: Masks = NO_IDS,
    gpus: Iterable[GpuName] | None = None,
    memory_blocks: int = 16,
    **fields: Any,
) -> Allocation:
    """An allocation with these core and memory ids, on these GPUs (by default those of its ids), which have `memory_blocks` each."""
    names = tuple(dict.fromkeys((*cores, *blocks)) if gpus is None else gpus)
    registry = GpuRegistry(tuple(RegisteredGpu(name, name, memory_blocks * BLOCK_MEBIBYTES) for name in names))
    return Allocation(**fields).with_ids(registry, {"core": cores, "memory": blocks}, names)


def block_count(allocation: Allocation) -> int:
    """The memory ids that it holds."""
    return count(allocation.held("memory"))
