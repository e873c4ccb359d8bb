"""The lag of the event loop, and the pauses of computing threads."""

import asyncio

import pytest

from gpumgr.common.event_loop import report_event_loop_lag, yielding_gil


async def test_reports_by_how_much_each_timer_was_missed() -> None:
    now = 0.0
    lates = iter([0.0, 0.25, -0.5])
    reported: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        late = next(lates, None)
        if late is None:
            raise asyncio.CancelledError
        now += seconds + late

    with pytest.raises(asyncio.CancelledError):
        await report_event_loop_lag(reported.append, period_seconds=2.0, sleep=sleep, clock=lambda: now)
    assert reported == pytest.approx([0.0, 0.25, 0.0])


def test_all_items_come_in_their_order() -> None:
    assert list(yielding_gil(range(1000))) == list(range(1000))
    assert list(yielding_gil(())) == []
