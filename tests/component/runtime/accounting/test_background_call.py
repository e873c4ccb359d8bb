"""Background calls: one that takes long is logged."""

import asyncio

from structlog.testing import capture_logs

from gpumgr.runtime.process_owners import LONG_SECONDS, BackgroundCall


async def test_a_call_that_takes_long_is_logged_once() -> None:
    now, never = [0.0], asyncio.Event()
    call = BackgroundCall("look", clock=lambda: now[0])

    async def work() -> None:
        await never.wait()

    with capture_logs() as lines:
        await call.start(work, timeout_seconds=0)
        now[0] = LONG_SECONDS - 1
        await call.start(work, timeout_seconds=0)
        assert lines == []
        now[0] = LONG_SECONDS + 1
        await call.start(work, timeout_seconds=0)
        await call.start(work, timeout_seconds=0)
    assert [(line["event"], line["call"]) for line in lines] == [("background_call_takes_long", "look")]
    await call.close()
