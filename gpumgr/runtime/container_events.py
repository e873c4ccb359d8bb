"""Entries of the history about containers; each becomes an event of the container's pod."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gpumgr.agent.history import History, about
from gpumgr.agent.inventory import Inventory
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.ledger.pods import PodKey
from gpumgr.ledger.usage.containers import Container


class AgentRecords(Protocol):
    """The agent's state, to read, and its history, to add to (gpumgr.agent.state.AgentState)."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def inventory(self) -> Inventory: ...

    @property
    def history(self) -> History: ...


class ContainerEvents:
    """`containers` returns the containers that run on allocations: their pods count where the ledger has no pod yet."""

    def __init__(self, records: AgentRecords, *, containers: Callable[[], Mapping[AllocationId, Sequence[Container]]]) -> None:
        self._records, self._containers = records, containers

    def add(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> None:
        """`reason` and `message` are those of the event. `gpus` are the GPUs concerned; none means all of the allocation."""
        self._records.history.add(self._entry(allocation, reason, message, gpus))

    def add_once(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> None:
        """As `add`, unless the same was added shortly before."""
        self._records.history.add_unless_repeated(self._entry(allocation, reason, message, gpus))

    def pod_of(self, allocation: AllocationId) -> tuple[PodKey, str] | None:
        """Name and UID of the allocation's pod, from the ledger, else from the container runtime; None if unknown."""
        holder = self._records.ledger.allocations.get(allocation)
        container = next(iter(self._containers().get(allocation, ())), None)
        pod = (holder.pod if holder else None) or (container.pod if container else None)
        uid = (holder.uid if holder else None) or (container.pod_uid if container else None)
        return (pod, uid) if pod and uid else None

    def _entry(self, allocation: AllocationId, reason: str, message: str, gpus: tuple[GpuName, ...]) -> HistoryEntry:
        holder = self._records.ledger.allocations.get(allocation)
        pod, uid = self.pod_of(allocation) or (None, None)
        entry = HistoryEntry(what="event", id=allocation, pod=pod, pod_uid=uid, gpus=gpus, why=message, code=reason)
        return about(holder, entry) if holder else entry
