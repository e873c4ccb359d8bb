"""What the mechanisms found, each thing told once: a count, a line in the log, an entry in the history and so an event of the pod."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.enforcement.backend import Finding, FindingCode

log = structlog.get_logger(__name__)

#: What is found again within this time is the same finding: one that comes and goes is told once.
SAME_FINDING_SECONDS: Final = 60.0
#: Reason of the event of a container that is over its memory, whoever noticed.
OVER_LIMIT: Final = "GpuMemoryOverLimit"

_REASONS: Final[Mapping[FindingCode, str]] = {
    "tampered": "GpuLimitTampered",
    "unregistered": "GpuLimitBypassed",
    "broken": "GpuLimitBroken",
    "over_limit": OVER_LIMIT,
}


class Findings:
    """`count` takes the mechanism and the code, `tell` the allocation, the event's reason and its message. `clock` is monotonic,
    in seconds."""

    def __init__(
        self,
        *,
        count: Callable[[str, str], None],
        tell: Callable[[AllocationId, str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._count, self._tell_history, self._clock = count, tell, clock
        self._seen_at: dict[tuple[AllocationId, FindingCode], float] = {}

    def tell(self, findings: Iterable[tuple[str, Finding]], allocations: Mapping[AllocationId, Allocation]) -> None:
        """All findings of one look, each with the mechanism's name. Those of allocations that are gone are nobody's."""
        now = self._clock()
        for backend, finding in findings:
            holder = allocations.get(finding.allocation)
            if holder is None:
                continue
            if (finding.allocation, finding.code) not in self._seen_at:
                self._tell_one(backend, finding, holder)
            self._seen_at[finding.allocation, finding.code] = now
        for allocation, code in [key for key, seen_at in self._seen_at.items() if now - seen_at >= SAME_FINDING_SECONDS]:
            log.info("enforcement_finding_gone", code=code, allocation=allocation)
            del self._seen_at[allocation, code]

    def _tell_one(self, backend: str, finding: Finding, holder: Allocation) -> None:
        self._count(backend, finding.code)
        log.warning(
            "enforcement_finding",
            backend=backend,
            code=finding.code,
            allocation=finding.allocation,
            holder=holder.describe(),
            message=finding.message,
        )
        self._tell_history(finding.allocation, _REASONS[finding.code], finding.message)
