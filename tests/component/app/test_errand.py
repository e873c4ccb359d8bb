"""Work that takes long: nobody waits for it longer than he wants, and only what takes really long is told."""

import asyncio

from structlog.testing import capture_logs

from gpumgr.app.errand import LONG_SECONDS, Errand


async def test_the_work_goes_on_and_is_never_out_twice() -> None:
    release, begun = asyncio.Event(), list[int]()

    async def work() -> None:
        begun.append(1)
        await release.wait()

    errand = Errand("look")
    assert not await errand.send(work, patience_seconds=0.01)
    assert not await errand.send(work, patience_seconds=0.01)
    release.set()
    await asyncio.sleep(0)
    assert await errand.send(work, patience_seconds=60)
    assert len(begun) == 2
    await errand.close()


async def test_what_takes_long_is_told_once() -> None:
    now, never = [0.0], asyncio.Event()
    errand = Errand("look", clock=lambda: now[0])

    async def work() -> None:
        await never.wait()

    with capture_logs() as lines:
        await errand.send(work, patience_seconds=0)
        now[0] = LONG_SECONDS - 1
        await errand.send(work, patience_seconds=0)
        assert lines == []
        now[0] = LONG_SECONDS + 1
        await errand.send(work, patience_seconds=0)
        await errand.send(work, patience_seconds=0)
    assert [(line["event"], line["errand"]) for line in lines] == [("errand_takes_long", "look")]
    await errand.close()
