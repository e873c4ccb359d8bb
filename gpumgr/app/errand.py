"""Work that may take long, for somebody who has a round to keep."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Errand:
    """Whoever sends it waits for so long and gets on; the work goes on too, and is never out twice at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._out: asyncio.Task[None] | None = None
        self._told = False

    async def send(self, work: Callable[[], Coroutine[Any, Any, None]], *, patience_seconds: float) -> bool:
        """True: the work is done. False: it is still out, or an earlier one is, and then this one was not begun.

        Raises what the work raised, at the next call if it was still out at the end of this one.
        """
        if self._out is not None and not self._came_back(self._out):
            return False
        self._out = asyncio.create_task(work(), name=self._name)
        await asyncio.wait({self._out}, timeout=patience_seconds)
        done = self._came_back(self._out)
        if not done and not self._told:
            log.warning("errand_takes_long", errand=self._name, waited_seconds=round(patience_seconds, 3))
        self._told = not done
        return done

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
