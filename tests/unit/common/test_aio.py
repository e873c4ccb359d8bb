"""Concurrency shapes: conflation, shielded work, daemons."""

import asyncio
import sys
import threading
from subprocess import run

import pytest
from structlog.testing import capture_logs

from gpumgr.common.aio import (
    LOG_SECONDS,
    BugLog,
    DaemonCalls,
    DaemonExitedError,
    LatestValue,
    finish_shielded,
    forever,
    next_tick,
    persistently,
    report_event_loop_lag,
    run_shielded,
    until_tick,
    yielding_gil,
)
from tests.background import background, until


async def test_a_slow_reader_sees_only_the_newest_value() -> None:
    latest = LatestValue(0)
    with latest.subscribe() as values:
        assert await anext(values) == 0
        for value in range(1, 100):
            latest.set(value)
        assert await anext(values) == 99


async def test_an_equal_value_wakes_no_waiter() -> None:
    latest = LatestValue(b"a")
    with latest.subscribe() as values:
        await anext(values)
        waiting = asyncio.ensure_future(anext(values))
        latest.set(bytes(bytearray(b"a")))
        await asyncio.sleep(0)
        assert not waiting.done()
        latest.set(b"b")
        assert await waiting == b"b"


async def test_shielded_work_continues_after_its_caller_is_cancelled() -> None:
    began, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await go_on.wait()
        done.set()

    caller = asyncio.create_task(run_shielded(work(), name="work"))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not await finish_shielded(0)
    go_on.set()
    assert await finish_shielded(5)
    assert done.is_set()


async def test_shielded_work_returns_and_raises() -> None:
    async def work(value: int) -> int:
        return 10 // value

    assert await run_shielded(work(2), name="work") == 5
    with pytest.raises(ZeroDivisionError):
        await run_shielded(work(0), name="work")
    assert await finish_shielded(0)


async def test_a_failure_without_a_waiter_is_logged() -> None:
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        raise ValueError("too late")

    caller = asyncio.create_task(run_shielded(work(), name="work"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with capture_logs() as logs:
        await asyncio.wait([caller])
        go_on.set()
        assert await finish_shielded(5)
    assert [(line["event"], line["task"], line["error"]) for line in logs] == [("cancelled_call_failed", "work", "too late")]


async def test_a_daemon_that_returns_is_an_error() -> None:
    with pytest.raises(DaemonExitedError, match="the daemon sweeper returned"):
        await forever("sweeper", lambda: asyncio.sleep(0))


async def test_a_daemon_that_must_not_end_the_agent_goes_on_after_its_bugs() -> None:
    ends = iter([LookupError("a bug"), None, ValueError("another one")])
    steady = asyncio.Event()

    async def work() -> None:
        end = next(ends, steady)
        if isinstance(end, Exception):
            raise end
        if end is steady:
            steady.set()
            await asyncio.Event().wait()

    with capture_logs() as logs:
        daemon = asyncio.create_task(persistently("teller", work, pause_seconds=0))
        await steady.wait()
        daemon.cancel()
        await asyncio.wait([daemon])
    assert daemon.cancelled()
    (told,) = logs
    assert (told["event"], told["log_level"], told["daemon"], told["error"]) == (
        "daemon_failed",
        "error",
        "teller",
        "LookupError('a bug')",
    )
    assert isinstance(told["exc_info"], LookupError)
    assert told["exc_info"].__traceback__ is not None


async def test_a_daemon_goes_on_after_a_bug_in_its_task_group() -> None:
    """Before Python 3.13 the group leaves its task marked as cancelled."""
    tries = 0

    async def fail() -> None:
        raise LookupError("a bug")

    async def work() -> None:
        nonlocal tries
        tries += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.Event().wait())

    with capture_logs():
        async with background(persistently("teller", work, pause_seconds=0)) as daemon:
            await until(lambda: tries > 1 or daemon.done())
    assert tries > 1


async def test_a_daemon_ends_if_it_is_cancelled_while_a_bug_ends_its_task_group() -> None:
    """Before Python 3.13 the group then raises the bug alone."""
    failing, ended = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        await failing.wait()
        raise LookupError("a bug")

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            await asyncio.sleep(0.01)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(end_slowly())

    with capture_logs():
        daemon = asyncio.create_task(persistently("teller", work, pause_seconds=0))
        await asyncio.sleep(0)
        failing.set()
        await ended.wait()
        daemon.cancel()
        await asyncio.wait([daemon])
    assert daemon.cancelled()


def test_one_bug_a_minute_is_logged_with_the_number_of_all() -> None:
    now = 0.0
    bugs = BugLog("teller", clock=lambda: now)
    with capture_logs() as logs:
        for now in (0.0, 1.0, LOG_SECONDS - 1, LOG_SECONDS, LOG_SECONDS + 1):  # noqa: B007
            bugs.record(LookupError("a bug"))
    assert [line["number"] for line in logs] == [1, 4]


# -- ticks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period_seconds", "after", "due"), [(1.0, 7.0, 8.0), (1.0, 7.25, 8.0), (2.0, 7.25, 8.0), (0.5, 7.25, 7.5)]
)
def test_a_tick_is_a_multiple_of_its_period(period_seconds: float, after: float, due: float) -> None:
    assert next_tick(period_seconds, after) == due
    assert 0 < until_tick(period_seconds) <= period_seconds


# -- calls that may hang ---------------------------------------------------------------------------------------------------


async def test_a_call_gives_what_it_returns_or_raises() -> None:
    calls = DaemonCalls("test")
    assert await calls.call(threading.current_thread, timeout_seconds=5) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await calls.call(lambda: 1 / 0, timeout_seconds=5)


async def test_while_a_call_hangs_others_fail_at_once_and_afterwards_all_is_well() -> None:
    calls, released = DaemonCalls("test"), threading.Event()
    with pytest.raises(TimeoutError):
        await calls.call(released.wait, timeout_seconds=0.01)
    with pytest.raises(TimeoutError, match="has not returned"):
        await calls.call(lambda: 1, timeout_seconds=3600)
    released.set()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await calls.call(lambda: 1, timeout_seconds=5) == 1
                return
            except TimeoutError:
                await asyncio.sleep(0.001)


async def test_a_thread_that_can_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of tasks is reached for a while."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = DaemonCalls("test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TimeoutError, match="test: can't start new thread"):
            await calls.call(int, timeout_seconds=10)
    assert await calls.call(int, timeout_seconds=10) == 0


async def test_a_caller_that_is_cancelled_leaves_the_call_alone() -> None:
    calls, released = DaemonCalls("test"), threading.Event()
    task = asyncio.create_task(calls.call(released.wait, timeout_seconds=3600))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    released.set()


def test_the_process_ends_while_a_call_hangs() -> None:
    code = """
import asyncio, threading
from gpumgr.common.aio import DaemonCalls
async def main():
    try:
        await DaemonCalls("test").call(threading.Event().wait, timeout_seconds=0.01)
    except TimeoutError:
        print("it hangs")
asyncio.run(main())
"""
    assert run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout == "it hangs\n"


# -- the event loop and the threads beside it ------------------------------------------------------------------------------------


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
