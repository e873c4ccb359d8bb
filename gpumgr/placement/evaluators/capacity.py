"""The free capacity of a GPU, as an evaluator gets it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCapacity:
    """One GPU's free capacity for one request.

    `index` is its row in the Topology. `entirely_free`: all its cores and all its blocks are. A GPU with `healthy` False is no
    candidate; `note` has the reason ("XID 79", "MIG enabled"). `label` is its name in refusals, GPU<index> by default.
    """

    index: int
    cores_free: int
    memory_blocks_free: int
    entirely_free: bool
    healthy: bool = True
    label: str | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        return self.label or f"GPU{self.index}"
