"""Runs a call that may take longer than the period of its caller."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

#: A call that is still running after this time is logged, once.
LONG_SECONDS: Final = 5.0


class BackgroundCall:
    """Runs at most one call at a time. The caller waits a bounded time; after that the call continues to its end without the caller.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._task: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._logged = False

    async def start(self, work: Callable[[], Coroutine[Any, Any, None]], *, timeout_seconds: float) -> bool:
        """Starts `work` unless an earlier call still runs, and waits up to `timeout_seconds` for the end of `work`.

        True: `work` has ended. False: `work` still runs, or was not started since the earlier call still runs. Raises what `work` raised.
        If `work` fails after this method returned, the next `start` raises its exception.
        """
        if self._task is not None and not self._ended(self._task):
            self._log_if_long()
            return False
        self._task, self._started_at, self._logged = asyncio.create_task(work(), name=self._name), self._clock(), False
        await asyncio.wait({self._task}, timeout=timeout_seconds)
        return self._ended(self._task)

    async def close(self) -> None:
        """Cancels the call that still runs, if any, and waits for its end."""
        if self._task is not None:
            self._task.cancel()
            (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
            if isinstance(outcome, Exception):
                log.warning("background_call_failed", call=self._name, error=str(outcome))

    def _log_if_long(self) -> None:
        seconds = self._clock() - self._started_at
        if seconds >= LONG_SECONDS and not self._logged:
            self._logged = True
            log.warning("background_call_takes_long", call=self._name, seconds=round(seconds, 1))

    def _ended(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            return False
        self._task = None
        task.result()
        return True
