import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from gpumgr.common.errors import NvmlError
from gpumgr.driver.worker import GpuBusy, GpuHangs, NvmlWorker

Threads = Callable[[], set[threading.Thread]]


@pytest.fixture
def threads() -> Threads:
    """The threads that the test has started and that have not ended."""
    before = {*threading.enumerate()}
    return lambda: {thread for thread in threading.enumerate() if thread.name == "nvml"} - before


@pytest.fixture
def worker() -> Iterator[NvmlWorker]:
    made = NvmlWorker()
    yield made
    made.close()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110 (it is another thread)
            await asyncio.sleep(0.01)


@contextmanager
def blocked() -> Iterator[threading.Event]:
    """The event that a hung call waits for; set at the end in any case."""
    release = threading.Event()
    try:
        yield release
    finally:
        release.set()


async def test_calls_about_the_driver_run_on_daemon_threads_in_order(worker: NvmlWorker) -> None:
    done: list[int] = []

    def work(number: int) -> threading.Thread:
        done.append(number)
        return threading.current_thread()

    used = await asyncio.gather(*(worker.call(partial(work, number), timeout_seconds=5) for number in range(20)))
    assert done == list(range(20))
    assert all(thread.daemon for thread in used)


async def test_one_thread_serves_all_gpus_that_answer(worker: NvmlWorker, threads: Threads) -> None:
    for _ in range(10):
        calls: dict[int | None, Callable[[], int]] = {gpu: partial(int, gpu) for gpu in range(16)}
        assert await worker.each(calls, timeout_seconds=5) == {gpu: gpu for gpu in range(16)}
    await until(lambda: len(threads()) == 1)


async def test_gpus_that_hang_cost_a_thread_each_and_the_others_nothing(worker: NvmlWorker, threads: Threads) -> None:
    with blocked() as release:
        calls: dict[int | None, Callable[[], object]] = {gpu: partial(int, gpu) for gpu in range(16)}
        calls |= {3: release.wait, 0: release.wait}
        for _ in range(3):
            answers = await worker.each(calls, timeout_seconds=0.2)
            assert [gpu for gpu, answer in answers.items() if isinstance(answer, GpuHangs)] == [0, 3]
            assert [answer for answer in answers.values() if not isinstance(answer, GpuHangs)] == [1, 2, *range(4, 16)]
        with pytest.raises(GpuHangs):
            await worker.call(lambda: 1, timeout_seconds=5, gpu=3)
        assert await worker.call(lambda: 1, timeout_seconds=5, gpu=4) == 1
        assert await worker.call(lambda: 2, timeout_seconds=5) == 2
        assert worker.stuck == {0, 3}
        await until(lambda: len(threads()) == 3)
        with pytest.raises(NvmlError, match=r"a call about GPU[03] hangs"):
            await worker.finish(timeout_seconds=5)
    await until(lambda: not worker.stuck)
    assert await worker.call(lambda: 3, timeout_seconds=5, gpu=3) == 3
    await until(lambda: len(threads()) == 1)


async def test_the_time_limit_of_a_call_begins_when_the_earlier_one_about_its_gpu_has_ended(worker: NvmlWorker) -> None:
    order: list[str] = []
    with blocked() as release:
        slow = asyncio.create_task(worker.call(lambda: order.append(str(release.wait())), timeout_seconds=60, gpu=1))
        next_one = asyncio.create_task(worker.call(lambda: order.append("next"), timeout_seconds=0.2, gpu=1))
        for _ in range(4):  # longer than the limit of the waiting call
            assert await worker.call(lambda: 7, timeout_seconds=5, gpu=2) == 7
            await asyncio.sleep(0.1)
        assert not next_one.done()
    await slow
    await next_one
    assert order == ["True", "next"]


async def test_a_call_that_may_not_wait_long_for_an_earlier_one_about_its_gpu_does_not_begin(worker: NvmlWorker) -> None:
    begun: list[int | None] = []
    with blocked() as release, blocked() as release_other:
        slow = asyncio.create_task(worker.call(release.wait, timeout_seconds=60, gpu=0))
        await until(lambda: 0 in worker._running)
        calls: dict[int | None, Callable[[], object]] = {gpu: partial(begun.append, gpu) for gpu in (0, None)}
        calls[1] = release_other.wait
        each = asyncio.create_task(worker.each(calls, timeout_seconds=60, wait_seconds=0.1))
        await until(lambda: 1 in worker._running and not worker._waiting)
        release.set()
        await slow
        assert await worker.call(lambda: 7, timeout_seconds=20, gpu=0) == 7
        assert not worker.stuck
        release_other.set()
        answers = await each
    assert isinstance(answers.pop(0), GpuBusy)
    assert answers == {1: True, None: None}
    assert begun == [None]


async def test_the_end_of_all_calls_is_awaited_also_of_cancelled_ones(worker: NvmlWorker) -> None:
    with blocked() as release:
        running = threading.Event()

        def work() -> None:
            running.set()
            release.wait()

        call = asyncio.create_task(worker.call(work, timeout_seconds=60, gpu=2))
        await asyncio.to_thread(running.wait)
        call.cancel()
        await asyncio.wait([call])
        assert not worker.stuck, "its caller has gone, and the driver does not hang"
        with pytest.raises(NvmlError, match=r"have not ended within 0\.1 s"):
            await worker.finish(timeout_seconds=0.1)
        end = asyncio.create_task(worker.finish(timeout_seconds=60))
    await end
    assert await worker.call(lambda: 3, timeout_seconds=5, gpu=2) == 3


async def test_errors_reach_the_caller_and_the_thread_continues(worker: NvmlWorker) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0, timeout_seconds=5)
    with pytest.raises(SystemExit):
        await worker.call(lambda: exit(3), timeout_seconds=5)
    assert await worker.call(lambda: 7, timeout_seconds=5) == 7


async def test_a_cancelled_call_is_not_started(worker: NvmlWorker) -> None:
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
    assert begun == ["third"]


def test_an_answer_after_the_loop_ended_is_dropped_and_a_new_loop_is_served(worker: NvmlWorker, threads: Threads) -> None:
    with blocked() as release:

        async def give_up() -> None:
            with pytest.raises(NvmlError):
                await worker.call(release.wait, timeout_seconds=0.01)

        asyncio.run(give_up())
    worker.close()
    for thread in threads():
        thread.join()

    async def again() -> int:
        return await worker.call(lambda: 4, timeout_seconds=5)

    worker.close()
    assert asyncio.run(again()) == 4
