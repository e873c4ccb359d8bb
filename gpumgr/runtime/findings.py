"""Findings of the enforcement backends, each reported once: counted, logged, and added to the history as an event of the pod."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from gpumgr.agent.ports import Finding, FindingCode
from gpumgr.ledger.ledger import Allocation, AllocationId

log = structlog.get_logger(__name__)

#: The same finding within this time is not reported again, so that one that comes and goes is reported once.
SAME_FINDING_SECONDS: Final = 60.0
#: Reason of the event of a container that is over its memory limit.
OVER_LIMIT: Final = "GpuMemoryOverLimit"

_REASONS: Final[Mapping[FindingCode, str]] = {
    "tampered": "GpuLimitTampered",
    "unregistered": "GpuLimitBypassed",
    "broken": "GpuLimitBroken",
    "over_limit": OVER_LIMIT,
}


class FindingsReporter:
    """`count` receives the backend and the code of a finding, `add_event` the allocation, the event's reason and its message.

    `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        count: Callable[[str, str], None],
        add_event: Callable[[AllocationId, str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._count, self._add_event, self._clock = count, add_event, clock
        self._seen_at: dict[tuple[AllocationId, FindingCode], float] = {}

    def report(self, findings: Iterable[tuple[str, Finding]], allocations: Mapping[AllocationId, Allocation]) -> None:
        """`findings`: all of one check, each with its backend. Findings of allocations that are gone are dropped."""
        now = self._clock()
        for backend, finding in findings:
            holder = allocations.get(finding.allocation)
            if holder is None:
                continue
            if (finding.allocation, finding.code) not in self._seen_at:
                self._report_one(backend, finding, holder)
            self._seen_at[finding.allocation, finding.code] = now
        for allocation, code in [key for key, seen_at in self._seen_at.items() if now - seen_at >= SAME_FINDING_SECONDS]:
            log.info("enforcement_finding_gone", code=code, allocation=allocation)
            del self._seen_at[allocation, code]

    def _report_one(self, backend: str, finding: Finding, holder: Allocation) -> None:
        self._count(backend, finding.code)
        log.warning(
            "enforcement_finding",
            backend=backend,
            code=finding.code,
            allocation=finding.allocation,
            holder=holder.describe(),
            message=finding.message,
        )
        self._add_event(finding.allocation, _REASONS[finding.code], finding.message)
