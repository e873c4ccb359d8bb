"""The event loop and the threads beside it: how late the loop is, and how a computing thread lets it run."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, NoReturn, TypeVar

from gpumgr.common.aio import next_tick

#: How long a thread computes before it releases the GIL, and for how long: enough for a waiting event loop to run.
_WORK_SECONDS: Final = 500e-6
_RELEASE_SECONDS: Final = 50e-6

T = TypeVar("T")


async def report_event_loop_lag(
    report: Callable[[float], None],
    *,
    period_seconds: float = 1.0,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Reports once a period by how many seconds the loop missed a timer. Runs until it is cancelled."""
    while True:
        now = clock()
        due = next_tick(period_seconds, now)
        await sleep(due - now)
        report(max(0.0, clock() - due))


def yielding_gil(items: Iterable[T]) -> Iterator[T]:
    """The items, with pauses between them: a computing thread keeps the GIL for 5 ms otherwise, a sleep releases it at once."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > _WORK_SECONDS:
            time.sleep(_RELEASE_SECONDS)
            since = time.perf_counter()
