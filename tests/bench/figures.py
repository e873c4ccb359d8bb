"""Times taken in rounds, as the figures that are reported."""

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

Rounds = Sequence[Sequence[float]]


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample below or at which `share` of all lie."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def spread(rounds: Rounds) -> dict[str, float | int]:
    """p50 and p99 in milliseconds, of seconds: the median of the rounds' own. `samples` is the number of all."""
    return {
        "p50_ms": round(1000 * statistics.median(quantile(samples, 0.50) for samples in rounds), 3),
        "p99_ms": round(1000 * statistics.median(quantile(samples, 0.99) for samples in rounds), 3),
        "samples": sum(map(len, rounds)),
    }


def median_and_worst(seconds: Sequence[float]) -> dict[str, float | int]:
    return {
        "median_seconds": round(statistics.median(seconds), 3),
        "worst_seconds": round(max(seconds), 3),
        "samples": len(seconds),
    }


class Stopwatch:
    """`with Stopwatch() as watch: ...`, then `watch.seconds`."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
