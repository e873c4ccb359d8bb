"""The source of random numbers, which is an argument, so that a seed gives the same result."""

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Random(Protocol):
    """`random.Random`, as far as it is used."""

    def expovariate(self, lambd: float) -> float: ...
    def random(self) -> float: ...
    def choice(self, seq: Sequence[_T], /) -> _T: ...
    def shuffle(self, x: MutableSequence[Any], /) -> None: ...
