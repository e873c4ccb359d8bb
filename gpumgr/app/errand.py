"""Work that may take long, for somebody who has a round to keep."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

#: The container runtime is asked once a second at most, so that a second's wait is nothing to tell.
LONG_SECONDS: Final = 5.0


class Errand:
    """Whoever sends it waits for so long and gets on; the work goes on too, and is never out twice at once."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._out: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._told = False

    async def send(self, work: Callable[[], Coroutine[Any, Any, None]], *, patience_seconds: float) -> bool:
        """True: the work is done. False: it is still out, or an earlier one is, and then this one was not begun.

        Raises what the work raised, at the next call if it was still out at the end of this one.
        """
        if self._out is not None and not self._came_back(self._out):
            self._tell()
            return False
        self._out, self._sent_at, self._told = asyncio.create_task(work(), name=self._name), self._clock(), False
        await asyncio.wait({self._out}, timeout=patience_seconds)
        return self._came_back(self._out)

    def _tell(self) -> None:
        out_seconds = self._clock() - self._sent_at
        if out_seconds >= LONG_SECONDS and not self._told:
            self._told = True
            log.warning("errand_takes_long", errand=self._name, seconds=round(out_seconds, 1))

    async def close(self) -> None:
        """Calls the work off."""
        if self._out is not None:
            self._out.cancel()
            try:
                await self._out
            except asyncio.CancelledError:
                pass
            except Exception as error:  # the process ends, and nobody waits for the outcome
                log.warning("errand_failed", errand=self._name, error=str(error))

    def _came_back(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            return False
        self._out = None
        task.result()
        return True
