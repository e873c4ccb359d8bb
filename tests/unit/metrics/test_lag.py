"""The loop's lag is what a timer was missed by, once a period."""

import asyncio

import pytest

from gpumgr.metrics.lag import watch_loop


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
        await watch_loop(reported.append, period_seconds=2.0, sleep=sleep, clock=lambda: now)
    assert reported == pytest.approx([0.0, 0.25, 0.0])
