"""What limits cost: container starts, registrations, the second's truth pass, the look at HAMi-core's regions; one JSON object.

`python -m tests.bench.bench_limits [--only PART]`. Each part is a module of its own, which says what it measures.
"""

import asyncio
from collections.abc import Callable, Mapping

from tests.bench import bench_prestart, bench_regions, bench_registrations, bench_usage, figures

PARTS: Mapping[str, Callable[[], Mapping[str, object]]] = {
    "prestart": lambda: asyncio.run(bench_prestart.measure(rounds=3)),
    "registrations": lambda: bench_registrations.measure(rounds=30),
    "usage": lambda: bench_usage.measure(rounds=200),
    "regions": lambda: asyncio.run(bench_regions.measure()),
}


def measure(only: str) -> Mapping[str, object]:
    return {name: part() for name, part in PARTS.items() if only in ("", name)}


if __name__ == "__main__":
    figures.main(measure, __doc__, only="")
