"""How late the event loop is: the one number that tells whether an asyncio process is well."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn


async def watch_loop(
    report: Callable[[float], None],
    *,
    period_seconds: float = 1.0,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Reports, once a period, by how many seconds the loop missed a timer. Runs until it is cancelled."""
    while True:
        due = clock() + period_seconds
        await sleep(period_seconds)
        report(max(0.0, clock() - due))
