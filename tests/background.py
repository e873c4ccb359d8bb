"""Daemons of a test, and what it waits for."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs it until the end of the block. Raises what it has failed with."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def loop_turns() -> AsyncIterator[Callable[[], int]]:
    """Counts how often the event loop has served others in this block."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with background(turn()):
        yield lambda: turns


async def until(condition: Callable[[], Any]) -> None:
    """For what has no event, such as files. The test's own time limit ends it. `condition` may be asynchronous."""
    while not (await found if inspect.isawaitable(found := condition()) else found):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
