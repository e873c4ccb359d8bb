"""Logs and counts how publishing goes: outages, refusals, dropped events."""

from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from gpumgr.kube.client import AnswerError
from gpumgr.kube.publisher.work_queue import Job, What

_log = structlog.get_logger(__name__)

#: Refusals of the same kind, and dropped events, are logged once in this time.
_LOG_AGAIN_SECONDS: Final = 3600.0
#: The RBAC rules that each kind of job needs.
RIGHTS: Final[dict[What, str]] = {
    "event": "create and patch on events",
    "eviction": "create on pods/eviction",
    "pod": "patch on pods",
    "annotations": "patch on nodes",
    "labels": "get and patch on nodes",
    "condition": "get on nodes and patch on nodes/status",
}


class DeliveryLog:
    """`written` counts by what was written ("pod", "event", "node", "eviction") and outcome ("ok", "refused"), `dropped` counts events.

    The start and the end of an outage are one line each. `clock` is monotonic, in seconds.
    """

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node, self._clock = node, clock
        self._logged: dict[tuple[str, int], float] = {}
        self.written: Counter[tuple[str, str]] = Counter()
        self.dropped = 0
        self.away = False

    def failed(self, error: str) -> None:
        """The API server does not answer, or answers with an error of its own."""
        if not self.away:
            self.away = True
            _log.warning("announcements_wait", error=error)

    def answered(self, waiting: int) -> None:
        """The API server answers; `waiting` jobs are left."""
        if self.away:
            self.away = False
            _log.info("announcements_go_on", waiting=waiting, dropped=self.dropped)

    def count(self, job: Job, outcome: str) -> None:
        self.written[job.what if job.what in ("pod", "event", "eviction") else "node", outcome] += 1

    def refused(self, job: Job, error: AnswerError) -> None:
        """A refusal that no retry changes; logged with its remedy, once an hour for each kind."""
        self.count(job, "refused")
        if "NamespaceTerminating" not in error.causes and self._is_new(job.what, error.status):
            _log.warning("announcement_refused", what=job.what, error=str(error), remedy=self._remedy(job.what, error.status))

    def drop(self, waiting: int, because: str) -> None:
        """An event is dropped; logged once an hour for each reason."""
        self.dropped += 1
        if self._is_new(because, 0):
            _log.warning("announcements_dropped", waiting=waiting, because=because)

    def _is_new(self, what: str, status: int) -> bool:
        """False if the same was logged within the last hour."""
        now, before = self._clock(), self._logged.get((what, status))
        if before is not None and now - before < _LOG_AGAIN_SECONDS:
            return False
        self._logged[what, status] = now
        return True

    def _remedy(self, what: What, status: int) -> str:
        if status == 403:
            return f"allow it in the agent's ClusterRole: {RIGHTS[what]}"
        if status == 404 and what in ("annotations", "labels", "condition"):
            return f"there is no node {self._node}: set node.name to the name that `kubectl get nodes` shows"
        return "nothing; it is not tried again"
