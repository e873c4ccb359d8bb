"""One call of the kubelet while it is decided: its caller, what each GPU has available, and the allocation's id."""

from dataclasses import dataclass

from gpumgr.allocator.callers import UNKNOWN_CALLER, Caller
from gpumgr.allocator.history import Call, Candidate, Entry
from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.errors import Refusal
from gpumgr.units import Resource


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """Completed while the call is decided. `id`: the allocation that the call concerns, or the one that it would make."""

    call: Call
    resource: Resource
    size: int
    id: AllocationId
    caller: Caller = UNKNOWN_CALLER
    candidates: tuple[Candidate, ...] = ()

    def refused(self, refusal: Refusal) -> Entry:
        return Entry(
            what="refused",
            id=self.id,
            pod=self.caller.pod,
            pod_uid=self.caller.uid,
            container=self.caller.container,
            call=self.call,
            kind=self.resource,
            size=self.size,
            why=str(refusal),
            code=refusal.code,
            candidates=self.candidates,
        )

    def granted(self, allocation: Allocation, evaluator: str | None) -> Entry:
        return Entry(
            what="granted",
            id=allocation.id,
            pod=allocation.pod,
            pod_uid=allocation.uid,
            container=allocation.container,
            call=self.call,
            kind=self.resource,
            size=self.size,
            gpus=tuple(allocation.gpus),
            amounts=allocation.gpus,
            evaluator=evaluator,
            why=allocation.why,
            mechanisms=allocation.mechanisms,
            candidates=self.candidates,
        )
