"""Events: equal notices are one Event with a count, which is written now and then while it grows."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from gpumgr.kubeapi.writer.jobs import Job
from gpumgr.kubeapi.writer.notices import Count, Notice
from gpumgr.kubeapi.writer.outbox import Outbox
from gpumgr.kubeapi.writer.pace import Pace
from gpumgr.kubeapi.writer.writes import Writes


@dataclass(slots=True, kw_only=True)
class _Series:
    """One notice over its window; it lives as long as its notice waits, at least. `written`: the API server has an Event of it.
    `due`: when it may be written (again)."""

    began: float
    due: float
    count: Count
    written: bool = False


class Series:
    """All of them. `clock` is monotonic, `wall` tells unix seconds."""

    def __init__(
        self, writes: Writes, outbox: Outbox[Job], pace: Pace, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._writes, self._outbox, self._pace, self._clock, self._wall = writes, outbox, pace, clock, wall
        self._series: dict[Notice, _Series] = {}

    def __len__(self) -> int:
        return len(self._series)

    def heard(self, notice: Notice) -> float:
        """Once more. When it is due to be written."""
        now, wall = self._clock(), self._wall()
        series = self._series.get(notice)
        if series is None or (notice not in self._outbox and self._is_over(series, now)):
            self._forget(now)
            series = self._series[notice] = _Series(began=now, due=now, count=Count(count=0, first_at=wall, last_at=wall))
        series.count = Count(count=series.count.count + 1, first_at=series.count.first_at, last_at=wall)
        return series.due

    def lost(self, notice: Notice) -> None:
        """It does not wait any more, for want of room."""
        if not self._series[notice].written:
            del self._series[notice]

    async def write(self, notice: Notice) -> None:
        """Makes the Event or writes its count. Raises what `Writes` raises."""
        series = self._series.get(notice)
        if series is None:
            return  # lost for want of room a moment ago
        count, done = series.count, True
        if not (series.written and await self._writes.recount_event(notice, count)):
            done = await self._writes.create_event(notice, count)
            series.written = True
        if self._series.get(notice) is not series:
            return  # lost meanwhile, and perhaps begun anew
        series.due = self._clock() + (self._pace.recount_seconds if done else self._pace.job_seconds[0])
        if done and series.count == count:
            self._outbox.done(notice)
        else:
            self._outbox.again(notice, series.due)

    def give_up(self, notice: Notice) -> None:
        self._outbox.done(notice)
        if (series := self._series.get(notice)) is not None:
            series.due = self._clock() + self._pace.recount_seconds

    def _is_over(self, series: _Series, now: float) -> bool:
        return now - series.began >= self._pace.window_seconds

    def _forget(self, now: float) -> None:
        """Makes room: what is over goes, and of what is written the oldest, if it is more than twice what may wait."""
        idle = {notice: series for notice, series in self._series.items() if notice not in self._outbox}
        too_many = max(0, len(self._series) - 2 * self._pace.capacity)
        for notice in [*islice(idle, too_many), *(notice for notice, series in idle.items() if self._is_over(series, now))]:
            self._series.pop(notice, None)
