"""How often to ask: seldom while nothing happens, each second while containers come and go."""

from typing import Final

#: So long after a change, or an announcement of one, the runtime is asked often.
EAGER_SECONDS: Final = 15.0
EAGER_PERIOD_SECONDS: Final = 1.0
CALM_PERIOD_SECONDS: Final = 10.0


class Pace:
    """All times are seconds of one monotonic clock. Nothing has been asked yet, so the first question is due."""

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._eager_until = float("-inf")

    @property
    def asked(self) -> float:
        """When the last question began."""
        return self._asked

    def ask(self, now: float) -> None:
        self._asked = now

    def wake(self, now: float) -> None:
        """Something has changed, or is about to."""
        self._eager_until = now + EAGER_SECONDS

    def due(self, now: float) -> bool:
        return now - self._asked >= (EAGER_PERIOD_SECONDS if now < self._eager_until else CALM_PERIOD_SECONDS)
