import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from gpumgr.errors import NvmlError
from gpumgr.nvml.worker import NvmlWorker


@contextmanager
def blocked() -> Iterator[threading.Event]:
    """The event that a hung call waits for; set at the end in any case."""
    release = threading.Event()
    try:
        yield release
    finally:
        release.set()


async def test_calls_run_on_one_daemon_thread_in_order() -> None:
    worker = NvmlWorker()
    done: list[int] = []

    def work(number: int) -> threading.Thread:
        done.append(number)
        return threading.current_thread()

    threads = await asyncio.gather(*(worker.call(partial(work, number), timeout_seconds=5) for number in range(20)))
    worker.close()
    assert done == list(range(20))
    assert len(set(threads)) == 1
    assert threads[0].daemon


async def test_errors_reach_the_caller_and_the_thread_continues() -> None:
    worker = NvmlWorker()
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0, timeout_seconds=5)
    with pytest.raises(SystemExit):
        await worker.call(lambda: exit(3), timeout_seconds=5)
    assert await worker.call(lambda: 7, timeout_seconds=5) == 7
    worker.close()


async def test_a_cancelled_call_is_not_started() -> None:
    worker = NvmlWorker()
    begun: list[str] = []
    with blocked() as release:
        first = asyncio.create_task(worker.call(release.wait, timeout_seconds=5))
        second = asyncio.create_task(worker.call(lambda: begun.append("second"), timeout_seconds=5))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    await first
    await worker.call(lambda: begun.append("third"), timeout_seconds=5)
    worker.close()
    assert begun == ["third"]


async def test_a_cancelled_caller_does_not_make_the_driver_stuck() -> None:
    worker = NvmlWorker()
    with blocked() as release:
        running = threading.Event()

        def hang() -> None:
            running.set()
            release.wait()

        task = asyncio.create_task(worker.call(hang, timeout_seconds=60))
        await asyncio.to_thread(running.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.stuck_seconds == 0.0
    assert await worker.call(lambda: 3, timeout_seconds=5) == 3
    worker.close()


def test_an_answer_after_the_loop_ended_is_dropped_and_a_new_loop_is_served() -> None:
    worker = NvmlWorker()
    with blocked() as release:

        async def give_up() -> None:
            with pytest.raises(NvmlError):
                await worker.call(release.wait, timeout_seconds=0.01)

        asyncio.run(give_up())
    thread = worker._thread
    assert thread is not None
    worker.close()
    thread.join()

    async def again() -> int:
        return await worker.call(lambda: 4, timeout_seconds=5)

    assert asyncio.run(again()) == 4
    worker.close()


async def test_close_can_be_repeated_and_work_begins_anew_after_it() -> None:
    worker = NvmlWorker()
    worker.close()
    assert await worker.call(lambda: 5, timeout_seconds=5) == 5
    worker.close()
    worker.close()
    assert await worker.call(lambda: 6, timeout_seconds=5) == 6
    worker.close()
