"""Reports GPUs with too little memory for their active containers, because it is granted more than once (hami.device_memory_scaling).

A container is active unless it is suspended. What counts is how much the active containers may use, not how much they use: beyond the GPU's
memory, an allocation of any of them can fail although it is within the container's limit.
"""

from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.suspension import overcommitted, used_by
from gpumgr.runtime.container_events import AgentRecords, ContainerEvents

#: Reason of the event of a pod with a container on such a GPU.
OVERCOMMITTED = "GpuOvercommitted"


class Overcommitment:
    def __init__(self, records: AgentRecords, events: ContainerEvents) -> None:
        self._records, self._events = records, events
        #: What was reported: the containers on each such GPU.
        self._reported: set[tuple[GpuName, AllocationId]] = set()

    def evaluate(self) -> None:
        """Call it for each sample. A GPU is reported when it becomes overcommitted, a container when it becomes active there."""
        ledger, found = self._records.ledger, set[tuple[GpuName, AllocationId]]()
        for name, gpu in self._records.inventory.gpus(ledger.gpu_registry).items():
            active = overcommitted(ledger.on(name), self._records.suspensions, name, gpu.memory_mebibytes)
            found |= {(name, each.id) for each in active}
            if active and not self._was(name):
                together = sum(each.limits_on(name).memory_mebibytes for each in active)
                text = (
                    f"the containers that are not suspended may use {together} MiB of memory together, and the GPU has "
                    f"{gpu.memory_mebibytes}: allocations can fail until idle ones are suspended (annotation gpumgr.io/suspend-when-idle)"
                )
                self._records.history.add_unless_repeated(HistoryEntry(what="gpu", code="overcommitted", gpus=(name,), why=text))
            for each in (one for one in active if (name, one.id) not in self._reported):
                others = {a.describe(): a.limits_on(name).memory_mebibytes << 20 for a in active if a is not each}
                why = f"allocations within the container's limit can fail: GPU {name} has too little memory for it and for "
                self._events.add_once(each.id, OVERCOMMITTED, f"{why}{used_by(others)}", name)
        self._reported = found

    def _was(self, gpu: GpuName) -> bool:
        return any(name == gpu for name, _ in self._reported)
