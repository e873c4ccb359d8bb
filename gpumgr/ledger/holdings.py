"""What containers hold of each GPU, as operators read it."""

from collections.abc import Iterator

from gpumgr.common.units import GpuName
from gpumgr.ledger.ids import GpuRegistry, RegisteredGpu
from gpumgr.ledger.ledger import Allocation, Ledger


def granted_mebibytes(ledger: Ledger) -> dict[GpuName, int]:
    """Memory that containers hold on each GPU; all memory of a GPU that a container has whole."""
    return {gpu.name: gpu.memory_mebibytes - ledger.available(gpu.name).memory_mebibytes for gpu in ledger.gpu_registry.gpus}


def current_shares(ledger: Ledger) -> list[Allocation]:
    """Allocations of a part of a GPU; an init container's counts until its pod's next container has replaced it."""
    started = {allocation.pod for allocation in ledger.allocations.values() if not allocation.init}
    return [a for a in ledger.allocations.values() if not a.whole and not (a.init and a.pod in started)]


def holdings(allocation: Allocation, gpu_registry: GpuRegistry) -> Iterator[tuple[RegisteredGpu, int, int]]:
    """The allocation's GPUs, with its cores and its MiB on each; all memory of a GPU that it has whole."""
    for name in allocation.places:
        amounts = allocation.amounts_on(name)
        yield gpu_registry.by_name[name], amounts.cores, amounts.memory_mebibytes
