"""What a durable commit costs, as the agent makes it: through the writer thread, from the event loop, fsync included.

`python tests/bench/bench_checkpoint.py [--folder DIR] [--rounds N]` prints JSON. Beside the commit stands, for
comparison, a bare 4 KiB append with fdatasync on the same file system, measured in turns with it.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from gpumgr.allocator.ledger import Allocation, Change
from gpumgr.checkpoint.store import SqliteCheckpoint
from tests.allocations import allocated

SAVES_PER_ROUND = 200


def allocation(n: int) -> Allocation:
    """A share of a GPU with 320 blocks, as a 10-core pod has it."""
    return allocated(
        id=f"{n:032x}",
        pod=("production", f"inference-{n}-7c9d8b6f5-abcde"),
        uid=f"00000000-0000-4000-8000-{n:012d}",
        container="server",
        cores={"8f2c11aa": 0x3FF << (n % 90)},
        blocks={"8f2c11aa": 0xFFFFFFFF << (n % 288)},
        gpus=("8f2c11aa",),
        granted_at=1_700_000_000.0 + n,
        why="share: best fit of 8 GPUs",
    )


async def commits(checkpoint: SqliteCheckpoint, first: int) -> list[float]:
    """Milliseconds of each save: one more allocation, and the oldest of 64 dropped."""
    took = []
    for n in range(first, first + SAVES_PER_ROUND):
        change = Change(put=(allocation(n),), drop=(allocation(n - 64).id,))
        started = time.perf_counter()
        await checkpoint.save(change)
        took.append((time.perf_counter() - started) * 1000)
    return took


def syncs(file: int) -> list[float]:
    """Milliseconds of a 4 KiB append and its fdatasync."""
    took = []
    for _ in range(SAVES_PER_ROUND):
        started = time.perf_counter()
        os.write(file, b"x" * 4096)
        os.fdatasync(file)
        took.append((time.perf_counter() - started) * 1000)
    return took


def quantiles(rounds: list[list[float]]) -> dict[str, float]:
    """p50 and p99 in milliseconds: of the rounds' own, the median."""
    cuts = [statistics.quantiles(took, n=100) for took in rounds]
    return {
        "p50_ms": round(statistics.median(cut[49] for cut in cuts), 3),
        "p99_ms": round(statistics.median(cut[98] for cut in cuts), 3),
    }


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    started = time.perf_counter()
    checkpoint = SqliteCheckpoint.open(folder)
    opened_ms = (time.perf_counter() - started) * 1000
    file = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    saves: list[list[float]] = []
    floor: list[list[float]] = []
    for turn in range(rounds):
        saves.append(await commits(checkpoint, 64 + turn * SAVES_PER_ROUND))
        floor.append(syncs(file))
    os.close(file)
    await checkpoint.close()
    return {
        "rounds": rounds,
        "saves_per_round": SAVES_PER_ROUND,
        "open_ms": round(opened_ms, 3),
        "commit": quantiles(saves),
        "fdatasync": quantiles(floor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="gpumgr-bench-") as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()
