"""How a thread that computes lets the event loop through: the interpreter gives its lock away every 5 ms only, but a sleep at once."""

import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

#: So long a thread computes before it takes a breath, and the breath: long enough for a waiting event loop to take over.
_WORK_SECONDS: Final = 500e-6
_BREATH_SECONDS: Final = 50e-6

T = TypeVar("T")


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items, with breaths between them."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > _WORK_SECONDS:
            time.sleep(_BREATH_SECONDS)
            since = time.perf_counter()
