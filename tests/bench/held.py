"""How long an event loop runs between two waits, and in all: the time during which nothing else gets its turn."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HeldTimes(selectors.DefaultSelector):
    """Seconds of each turn of the loop since the last `take`; waiting for the interpreter's lock, which other threads hold, is part of
    them."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[float] = []
        self._since: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since is not None:
            self._turns.append(time.perf_counter() - self._since)
        try:
            return super().select(timeout)
        finally:
            self._since = time.perf_counter()

    def take(self) -> list[float]:
        """Called from inside the loop; its present turn is counted up to now."""
        now = time.perf_counter()
        if self._since is not None:
            self._turns.append(now - self._since)
        self._since, taken, self._turns = now, self._turns, []
        return taken


def run_held(measure: Callable[[HeldTimes], Coroutine[Any, Any, T]]) -> T:
    """Runs it in an event loop, and measures the turns of that."""
    held = HeldTimes()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(held)) as runner:
        return runner.run(measure(held))
