"""What limits cost: container starts, registrations, the second's truth pass, the look at HAMi-core's regions; one JSON object.

`python -m tests.bench.bench_limits [--only PART]`. Each part is a module of its own, which says what it measures.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from tests.bench import bench_prestart, bench_regions, bench_registrations, bench_usage


def regions() -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gb-") as folder:
        return asyncio.run(bench_regions.measure(Path(folder)))


PARTS: Mapping[str, Callable[[], Mapping[str, object]]] = {
    "prestart": lambda: asyncio.run(bench_prestart.measure(rounds=3)),
    "registrations": lambda: bench_registrations.measure(rounds=30),
    "usage": lambda: bench_usage.measure(rounds=200),
    "regions": regions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    print(json.dumps({name: measure() for name, measure in PARTS.items() if only in (None, name)}, indent=2))


if __name__ == "__main__":
    main()
