"""Times taken in rounds, as the figures that are reported; and the command line of a benchmark."""

import argparse
import asyncio
import inspect
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import psutil  # type: ignore[import-untyped]
import structlog

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


def resident_mib(pid: int | None = None) -> float:
    """The resident memory of a process; None: of this one."""
    return round(float(psutil.Process(pid).memory_info().rss) / (1 << 20), 1)


def cpu_seconds(pid: int) -> float:
    taken = psutil.Process(pid).cpu_times()
    return float(taken.user + taken.system)


def log_to_stderr() -> None:
    """Warnings alone: standard output has the figures."""
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )


def main(measure: Callable[..., Any], description: str | None, **defaults: float | str) -> None:
    """Prints what `measure` returns as JSON. Each of its arguments is an option with a default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    log_to_stderr()
    found = measure(**vars(parser.parse_args()))
    print(json.dumps(asyncio.run(found) if inspect.iscoroutine(found) else found, indent=2))
