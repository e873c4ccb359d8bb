"""Concurrency helpers of the event loop. A daemon is a coroutine that runs until it is cancelled."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

import structlog

T = TypeVar("T")

#: `sliced` lets other tasks run each time this has passed.
SLICE_SECONDS = 0.005
#: The shortest interval of `LogPace`.
LOG_SECONDS: Final = 60.0
_KILL_SECONDS: Final = 2.0

_log = structlog.get_logger(__name__)
#: Keeps the tasks of `run_shielded` alive: the event loop has only weak references to tasks.
_shielded: set[asyncio.Task[Any]] = set()


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields the items, and lets other tasks run whenever SLICE_SECONDS have passed."""
    began = time.perf_counter()
    for item in items:
        if time.perf_counter() > began + SLICE_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()
        yield item


async def in_slices(steps: Iterable[object]) -> None:
    """Runs all steps, with pauses as in `sliced`."""
    async for _ in sliced(steps):
        pass


class LatestValue(Generic[T]):
    """The newest value of something. A reader never delays the writer, and may miss a value that is replaced before the reader runs. `set`
    does nothing if the value is equal to the current one."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._subscriptions: set[Subscription[T]] = set()

    @property
    def value(self) -> T:
        return self._value

    @property
    def readers(self) -> int:
        return len(self._subscriptions)

    def set(self, value: T) -> None:
        if value == self._value:
            return
        self._value = value
        for subscription in self._subscriptions:
            subscription._wake.set()

    def end_readers(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()

    @contextmanager
    def subscribe(self) -> "Iterator[Subscription[T]]":
        """Use it as `with latest.subscribe() as values: async for value in values`."""
        subscription = Subscription(self)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)


class Subscription(Generic[T]):
    """Yields the current value, then the newest one after each change, until `close`."""

    def __init__(self, source: LatestValue[T]) -> None:
        self._source = source
        self._wake = asyncio.Event()
        self._wake.set()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._wake.wait()
        self._wake.clear()
        if self._closed:
            raise StopAsyncIteration
        return self._source.value


def next_tick(period_seconds: float, after: float) -> float:
    """Returns the first multiple of the period after `after`, in seconds of the event loop's clock. Daemons with the same period wait for
    the same multiples, so they wake the process only once."""
    return after - after % period_seconds + period_seconds


def until_tick(period_seconds: float) -> float:
    now = time.monotonic()
    return next_tick(period_seconds, now) - now


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class DaemonCalls:
    """Runs blocking calls that may hang (network file systems), one at a time on one daemon thread. Unlike with `asyncio.to_thread`, a call
    that hangs does not delay the end of the process, and occupies no thread of a pool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False
        self._calls: queue.SimpleQueue[Callable[[], None]] | None = None

    async def call(self, work: Callable[[], T], *, timeout_seconds: float) -> T:
        """Raises the errors of `work`; TimeoutError after `timeout_seconds`, and at once if an earlier call still runs or no thread can be
        started."""
        if self._busy:
            raise TimeoutError(f"{self._name}: an earlier call has not returned yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(settle: Callable[[], None]) -> None:
            self._busy = False
            if not answer.done():  # the caller may have been cancelled
                settle()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                settle = partial(answer.set_exception, error)
            else:
                settle = partial(answer.set_result, result)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(end, settle)

        if self._calls is None:
            calls = queue.SimpleQueue[Callable[[], None]]()
            try:
                threading.Thread(target=_run_calls, args=(calls,), name=self._name, daemon=True).start()
            except RuntimeError as error:
                raise TimeoutError(f"{self._name}: {error}") from error
            self._calls = calls
        self._busy = True
        self._calls.put(run)
        async with asyncio.timeout(timeout_seconds):
            return await answer


def _run_calls(calls: "queue.SimpleQueue[Callable[[], None]]") -> NoReturn:
    while True:
        calls.get()()


async def kill_program(program: asyncio.subprocess.Process) -> None:
    """Kills the program and waits at most 2 s for its end, because a program that waits for a lost GPU does not end."""
    with suppress(ProcessLookupError, TimeoutError):
        program.kill()
        async with asyncio.timeout(_KILL_SECONDS):
            await program.wait()


async def run_until(end: Awaitable[object], work: Awaitable[T]) -> asyncio.Future[T]:
    """Runs `work` and `end` until one of them is done, and cancels the other. Returns the future of `work`: done, or cancelled."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.wait({working, ending})
    return working


async def run_shielded(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Runs `work` in its own task. If the caller is cancelled, the work continues, and its error is logged. `finish_shielded` waits for
    the work at shutdown."""
    task = asyncio.create_task(work, name=name)
    _shielded.add(task)
    task.add_done_callback(_shielded.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("cancelled_call_failed", task=task.get_name(), error=str(error), kind=type(error).__name__)


async def finish_shielded(timeout_seconds: float) -> bool:
    """Waits for all shielded work of this event loop. Returns False if some still runs after `timeout_seconds`."""
    loop = asyncio.get_running_loop()
    running = {task for task in _shielded if task.get_loop() is loop and task is not asyncio.current_task()}
    if not running:
        return True
    _, left = await asyncio.wait(running, timeout=timeout_seconds)
    return not left


class DaemonExitedError(RuntimeError):
    """A daemon returned, which is a bug."""


async def forever(name: str, work: Callable[[], Awaitable[object]]) -> NoReturn:
    """Runs the daemon `work`. Raises its errors, and DaemonExitedError if it returns."""
    await work()
    raise DaemonExitedError(f"the daemon {name} returned; it must run until it is cancelled")


class LogPace:
    """Limits the log of a repeated failure to one line per LOG_SECONDS. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._logged_at = clock, float("-inf")

    def due(self) -> bool:
        if (now := self._clock()) < self._logged_at + LOG_SECONDS:
            return False
        self._logged_at = now
        return True


class BugLog:
    """Logs bugs that do not end the process, with the traceback, at the pace of LogPace."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._pace, self._number = name, LogPace(clock), 0

    def record(self, error: Exception) -> None:
        self._number += 1
        if self._pace.due():
            _log.error("daemon_failed", daemon=self._name, error=repr(error), number=self._number, exc_info=error)


async def persistently(name: str, work: Callable[[], Awaitable[object]], *, pause_seconds: float = 1.0) -> NoReturn:
    """Runs the daemon `work`, without which the process can continue for a while. If the daemon raises an error or returns, this is logged
    as a bug (`BugLog`), and after a pause `work` is called again."""
    bugs = BugLog(name)
    while True:
        try:
            # `work` has its own task: before Python 3.13, a task group that fails can leave the task around it marked as cancelled.
            await asyncio.create_task(forever(name, work), name=name)
        except Exception as error:
            bugs.record(error)
            # Before Python 3.13, a task group that fails also loses a cancellation that arrives at the same time.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error
        await asyncio.sleep(pause_seconds)


#: How often `yielding_gil` releases the GIL.
_WORK_SECONDS: Final = 500e-6
#: How long it then sleeps: enough for a waiting event loop to run.
_RELEASE_SECONDS: Final = 50e-6


async def report_event_loop_lag(
    report: Callable[[float], None],
    *,
    period_seconds: float = 1.0,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Calls `report` once per period with the seconds by which a timer of the event loop was late."""
    while True:
        now = clock()
        due = next_tick(period_seconds, now)
        await sleep(due - now)
        report(max(0.0, clock() - due))


def yielding_gil(items: Iterable[T]) -> Iterator[T]:
    """Yields the items and releases the GIL every 0.5 ms, because a thread that only computes keeps the GIL for 5 ms at a time."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > _WORK_SECONDS:
            time.sleep(_RELEASE_SECONDS)
            since = time.perf_counter()
