"""Work that a thread repeats while a block lasts; and how long something is away: the longest time between two signs of life."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .processes import wait_until


@contextmanager
def repeated(work: Callable[[], object], every_seconds: float) -> Iterator[None]:
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(every_seconds):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


class Gap:
    """What `gap` has seen. Times are of the monotonic clock, in seconds."""

    def __init__(self, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._last, self._missed = time.monotonic(), False
        #: When the longest gap began and ended, by the signs of life around it.
        self.longest: tuple[float, float] = (0.0, 0.0)
        #: All gaps in which it was seen not to live.
        self.spans: list[tuple[float, float]] = []
        self.signs = 0

    @property
    def seconds(self) -> float:
        """Length of the longest gap so far."""
        return self.longest[1] - self.longest[0]

    def look(self) -> None:
        asked = time.monotonic()
        if not self._alive():
            self._missed = True
            return
        now = time.monotonic()
        self.signs += 1
        if self._missed:
            self.spans.append((self._last, now))
            self._missed = False
        if now - self._last > self.seconds:
            self.longest = (self._last, now)
        self._last = asked  # it may have ended before the answer came


@contextmanager
def gap(alive: Callable[[], bool], every_seconds: float = 0.01) -> Iterator[Gap]:
    """Asks `alive` again and again while the block lasts."""
    wait_until("it lives when the watch begins", alive)
    seen = Gap(alive)
    with repeated(seen.look, every_seconds):
        yield seen
