"""How the writing goes: whether the API server answers, what it took and refused, and what of it the log is told."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from gpumgr.kubeapi.client import AnswerError
from gpumgr.kubeapi.writer.jobs import Job, Word, remedy, what, word_of

_log = structlog.get_logger(__name__)

_TELL_AGAIN_SECONDS: Final = 3600.0


class Weather:
    """`written` counts by what was written ("pod", "event", "node", "eviction") and how ("ok", "refused"), `dropped` what was lost for
    want of room. An outage and its end are a line each; a refusal is told once an hour for each kind."""

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node, self._clock = node, clock
        self._written: Counter[tuple[str, str]] = Counter()
        self._told_of_refusal: dict[tuple[Word, int], float] = {}
        self._told_of_drops = False
        self.away = False
        self.dropped = 0

    @property
    def written(self) -> Mapping[tuple[str, str], int]:
        return dict(self._written)

    def went(self, job: Job) -> None:
        self._written[what(job), "ok"] += 1

    def failed(self, error: str) -> None:
        if not self.away:
            self.away = True
            _log.warning("announcements_wait", error=error)

    def answers(self, waiting: int) -> None:
        if self.away:
            self.away = False
            _log.info("announcements_go_on", waiting=waiting, dropped=self.dropped)

    def refused(self, job: Job, error: AnswerError) -> None:
        """For good: no retry changes it."""
        self._written[what(job), "refused"] += 1
        word, now = word_of(job), self._clock()
        told = self._told_of_refusal.get((word, error.status))
        if "NamespaceTerminating" in error.causes or (told is not None and now - told < _TELL_AGAIN_SECONDS):
            return  # of a namespace that ends, nobody reads the events any more
        self._told_of_refusal[word, error.status] = now
        _log.warning("announcement_refused", what=word, error=str(error), remedy=remedy(word, error.status, self._node))

    def lost(self, waiting: int) -> None:
        """An event, for want of room."""
        self.dropped += 1
        if not self._told_of_drops:
            self._told_of_drops = True
            _log.warning("announcements_dropped", waiting=waiting, because="more is said than the API server takes")

    def all_said(self) -> None:
        """Nothing waits; losses from now on are news."""
        self._told_of_drops = False
