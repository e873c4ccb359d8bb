"""One call of the kubelet's while it is decided: who asks, what each GPU had left, and under which name all of it is told."""

from dataclasses import dataclass

from gpumgr.allocator.callers import UNKNOWN_CALLER, Caller
from gpumgr.allocator.history import Call, Candidate, Entry
from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.errors import Refusal
from gpumgr.units import Resource


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """Filled in as the call is understood. `id` is the allocation's that it concerns, or the one that it would make."""

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
