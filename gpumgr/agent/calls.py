"""One call of the kubelet while it is decided: its caller, what each GPU has available, and the allocation's id."""

from dataclasses import dataclass, replace

from gpumgr.agent.history import about
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Resource
from gpumgr.ledger.callers import UNKNOWN_CALLER, Caller
from gpumgr.ledger.history import Call, Candidate, HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """Completed while the call is decided. `id`: the allocation that the call concerns, or the one that it would make."""

    call: Call
    resource: Resource
    size: int
    id: AllocationId
    caller: Caller = UNKNOWN_CALLER
    candidates: tuple[Candidate, ...] = ()

    def refused(self, refusal: Refusal) -> HistoryEntry:
        caller = self.caller
        entry = HistoryEntry(what="refused", id=self.id, pod=caller.pod, pod_uid=caller.uid, container=caller.container)
        return self._of_call(replace(entry, why=str(refusal), code=refusal.code))

    def granted(self, allocation: Allocation, evaluator: str | None) -> HistoryEntry:
        entry = HistoryEntry(what="granted", amounts=allocation.gpus, evaluator=evaluator, why=allocation.why)
        return self._of_call(about(allocation, replace(entry, mechanisms=allocation.mechanisms)))

    def _of_call(self, entry: HistoryEntry) -> HistoryEntry:
        return replace(entry, call=self.call, kind=self.resource, size=self.size, candidates=self.candidates)
