"""What one pass of the HAMi-core backend costs: a look at every region, and the repair of those that need none.

`python -m tests.bench.bench_regions [--regions N] [--processes N] [--folder DIR]` prints JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import Running
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.hami_core.region import Write
from gpumgr.enforcement.hami_core.seed import LAYOUT
from gpumgr.usage.containers import Container

ROUNDS = 30


async def measure(regions: int, processes: int, folder: Path) -> dict[str, float]:
    """Median and maximum in milliseconds of `observe` and of `adjust`, with so many processes in each region; `folder` is on a tmpfs."""
    backend = _backend(folder)
    running = [_running(n, processes) for n in range(regions)]
    try:
        for each in running:
            await backend.start(each.tenant)
            _fill(folder / "run" / "hami-core" / each.tenant.allocation / "region.cache", each.pids)
        took: dict[str, list[float]] = {"observe": [], "adjust": []}
        for _ in range(ROUNDS):
            started = time.perf_counter()
            findings = await backend.observe(running)
            looked = time.perf_counter()
            await backend.adjust(running)
            took["observe"].append((looked - started) * 1000)
            took["adjust"].append((time.perf_counter() - looked) * 1000)
            assert not findings
    finally:
        await backend.close()
    return {
        f"{name}_{quantile}_ms": round(value, 2)
        for name, values in took.items()
        for quantile, value in (("p50", statistics.median(values)), ("max", max(values)))
    }


def _backend(folder: Path) -> HamiCore:
    library = folder / "libvgpu.so"
    subprocess.run(["cc", "-shared", "-x", "c", "-o", library, "/dev/null"], check=True)
    return HamiCore(
        library_path=library,
        library_sha256=sha256(library.read_bytes()).hexdigest(),
        library_dir=folder / "lib",
        run_dir=folder / "run",
        nspid_of=lambda pid: pid,
    )


def _running(n: int, processes: int) -> Running:
    tenant = Tenant(
        allocation=f"{n:016x}", gpu="0fe1c342", uuid="GPU-0fe1c342-aaaa-bbbb-cccc-0123456789ab", cores=10, memory_bytes=1 << 30
    )
    pids = tuple(range(1 + n * processes, 1 + (n + 1) * processes))
    container = Container(id=f"{n}", pod=("bench", f"p{n}"), pod_uid=f"{n}", name="main")
    return Running(tenant=tenant, container=container, pids=pids, gpu_processes=dict.fromkeys(pids, 1 << 20))


def _fill(path: Path, pids: tuple[int, ...]) -> None:
    """Slots of processes that run, as the library writes them."""
    words = [Write(offset=LAYOUT.proc_num, data=len(pids).to_bytes(4, "little"))]
    for index, pid in enumerate(pids):
        start = LAYOUT.slot_at(index)
        number = pid.to_bytes(4, "little")
        words += [
            Write(offset=start, data=number + number),
            Write(offset=start + LAYOUT.slot.status, data=(1).to_bytes(4, "little")),
        ]
    with path.open("r+b", buffering=0) as file:
        for word in words:
            os.pwrite(file.fileno(), word.data, word.offset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regions", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = asyncio.run(measure(given.regions, given.processes, Path(folder)))
    print(json.dumps({"regions": given.regions, "processes": given.processes, **figures}))


if __name__ == "__main__":
    main()
