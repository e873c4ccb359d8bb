"""Concurrency in the few shapes that gpumgr uses: a conflating broadcast, work that no caller can cut in half, named daemons, calls that
may hang.

Rule 1. A reader of `Latest` sees the newest value, perhaps not every value, and never delays the writer.
Rule 2. A state change under way is finished even if nobody waits for its answer any more (`run_shielded`).
Rule 3. A daemon never ends in silence: one that returns has a bug and says so (`forever`).
Rule 4. What only tells people something must not end the agent: its bugs are logged, and it goes on (`persistently`, `Bugs`).
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

import structlog

T = TypeVar("T")

#: How often a bug is told that comes again and again.
BUG_AGAIN_SECONDS: Final = 60.0

_log = structlog.get_logger(__name__)
#: Strong references: the event loop itself keeps only weak ones to its tasks.
_shielded: set[asyncio.Task[Any]] = set()


class Latest(Generic[T]):
    """The newest value of something, for any number of readers. `set` never blocks; equal values are no change."""

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

    def subscribe(self) -> "Subscription[T]":
        """A reader, to be used as `with latest.subscribe() as values: async for value in values`."""
        return Subscription(self)


class Subscription(Generic[T]):
    """Yields the current value, then the newest after each change, until `close` is called (from any other task)."""

    def __init__(self, source: Latest[T]) -> None:
        self._source = source
        self._wake = asyncio.Event()
        self._wake.set()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def __enter__(self) -> Self:
        self._source._subscriptions.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source._subscriptions.discard(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._wake.wait()
        self._wake.clear()
        if self._closed:
            raise StopAsyncIteration
        return self._source.value


async def sleep_as_told(seconds: Latest[float]) -> None:
    """Sleeps for so long, counted from now. A value that comes meanwhile counts at once, from the same beginning."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with seconds.subscribe() as values, suppress(TimeoutError):
        while True:
            async with asyncio.timeout_at(begun + seconds.value):
                await anext(values)


class DaemonCalls:
    """Blocking calls that may never return, as those of a network file system: one at a time, each on a daemon thread of its own.

    Unlike with `asyncio.to_thread`, the end of the process does not wait for one that hangs, nor do others' calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def call(self, work: Callable[[], T], *, timeout_seconds: float) -> T:
        """What `work` returns or raises. Raises TimeoutError if that takes longer, or at once while an earlier call hangs still."""
        if self._busy:
            raise TimeoutError(f"{self._name}: an earlier call has not returned yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(settle: Callable[[], None]) -> None:
            self._busy = False
            if not answer.done():  # somebody waits still
                settle()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # whatever it is, it belongs to the caller, not to this thread
                settle = partial(answer.set_exception, error)
            else:
                settle = partial(answer.set_result, result)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, settle)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        self._busy = True
        async with asyncio.timeout(timeout_seconds):
            return await answer


async def run_shielded(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Runs `work` in a task of its own and waits for it. If the caller is cancelled, the work still goes on to its end.

    A failure that nobody waits for any more is logged. `finish_shielded` waits for what is left at shutdown.
    """
    task = asyncio.create_task(work, name=name)
    _shielded.add(task)
    task.add_done_callback(_shielded.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_report_unheard)
        raise


def _report_unheard(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("unheard_failure", task=task.get_name(), error=str(error), kind=type(error).__name__)


async def finish_shielded(timeout_seconds: float) -> bool:
    """Waits until all shielded work of this event loop has ended. False: some still runs after `timeout_seconds`."""
    loop = asyncio.get_running_loop()
    running = {task for task in _shielded if task.get_loop() is loop and task is not asyncio.current_task()}
    if not running:
        return True
    _, left = await asyncio.wait(running, timeout=timeout_seconds)
    return not left


class DaemonExitedError(RuntimeError):
    """A daemon returned although it should run until it is cancelled: a bug."""


async def forever(name: str, work: Callable[[], Awaitable[object]]) -> NoReturn:
    """Runs a daemon under a task group. Its errors pass through; a return is an error too.

    Raises DaemonExitedError if `work` returns.
    """
    await work()
    raise DaemonExitedError(f"the daemon {name} returned; it must run until it is cancelled")


class Bugs:
    """Bugs that something survives, for the log: with their traceback, one in a minute however many there are. `clock` is monotonic,
    in seconds."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._told_at = float("-inf")
        self._number = 0

    def tell(self, error: Exception) -> None:
        self._number += 1
        now = self._clock()
        if now - self._told_at >= BUG_AGAIN_SECONDS:
            self._told_at = now
            _log.error("daemon_failed", daemon=self._name, error=repr(error), number=self._number, exc_info=error)


async def persistently(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    pause_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Runs a daemon that the agent can do without for a while: after an error, or a return, it begins anew in `pause_seconds`.

    `work` must leave things so that it can begin anew. Errors are bugs, and told as `Bugs` tells them.
    """
    bugs = Bugs(name, clock=clock)
    while True:
        try:
            await forever(name, work)
        except Exception as error:
            bugs.tell(error)
        await asyncio.sleep(pause_seconds)


async def every(
    period_seconds: float,
    work: Callable[[], Awaitable[object]],
    *,
    name: str,
    weather: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Runs `work`, waits `period_seconds`, and again. Errors of the kinds in `weather` are logged once per text and retried.

    Every other error passes through: it is a bug, and the task group above ends the process with it.
    """
    said: str | None = None
    while True:
        try:
            await work()
            said = None
        except weather as error:
            if str(error) != said:
                said = str(error)
                _log.warning("daemon_retries", daemon=name, error=said)
        await asyncio.sleep(period_seconds)
