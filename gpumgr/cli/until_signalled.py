"""The life of a controller's process, until a signal ends it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


def run_until_signalled(run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """`run` gets an event that SIGTERM and SIGINT set."""

    async def until_signalled() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run(stop)

    asyncio.run(until_signalled())
