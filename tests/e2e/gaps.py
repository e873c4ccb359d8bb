"""How long something is away: the longest time between two signs of life."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from .processes import wait_until


class Gap:
    """Asks `alive` again and again in a thread, while the block lasts. Times are of the monotonic clock, in seconds."""

    def __init__(self, alive: Callable[[], bool], every_seconds: float = 0.01) -> None:
        self._alive, self._every = alive, every_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        #: When the longest gap began and ended, by the signs of life around it.
        self.longest: tuple[float, float] = (0.0, 0.0)
        #: All gaps in which it was seen not to live.
        self.spans: list[tuple[float, float]] = []
        self.signs = 0

    def __enter__(self) -> "Gap":
        wait_until("it lives when the watch begins", self._alive)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Length of the longest gap so far."""
        return self.longest[1] - self.longest[0]

    def _watch(self) -> None:
        last, missed = time.monotonic(), False
        while not self._stopping.wait(self._every):
            asked = time.monotonic()
            if not self._alive():
                missed = True
                continue
            now = time.monotonic()
            self.signs += 1
            if missed:
                self.spans.append((last, now))
                missed = False
            if now - last > self.seconds:
                self.longest = (last, now)
            last = asked  # it may have ended before the answer came
