"""What one pass of the HAMi-core backend costs: a look at every region, and the check whether it needs a repair.

`python -m tests.bench.bench_regions [--regions N] [--processes N]` prints one JSON object.
"""

import os
import tempfile
from pathlib import Path

from gpumgr.agent.ports import RunningContainer
from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.hami_core.region import FILE_NAME
from gpumgr.ledger.node_use import Container
from tests.bench import figures
from tests.bench.figures import Stopwatch, spread
from tests.libvgpu import build
from tests.shares import gpu_share

ROUNDS = 300


async def measure(regions: int, processes: int) -> dict[str, object]:
    """`processes`: in each region; the regions are on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gb-") as folder:
        return await measure_in(Path(folder), regions, processes)


async def measure_in(folder: Path, regions: int, processes: int) -> dict[str, object]:
    backend = _backend(folder)
    running = [_running(n, processes) for n in range(regions)]
    try:
        for each in running:
            await backend.start(each.tenant)
            fill(folder / "run" / "hami-core" / each.tenant.allocation / FILE_NAME, each.pids)
        took: list[float] = []
        for _ in range(ROUNDS):
            with Stopwatch() as watch:
                findings = await backend.observe(running)
                await backend.adjust(running)
            took.append(watch.seconds)
            assert not findings
    finally:
        await backend.close()
    return {"regions": regions, "pass": spread([took])}


def fill(path: Path, pids: tuple[int, ...]) -> None:
    """Slots of processes that run, as the library writes them into the region at `path`."""
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), len(pids).to_bytes(4, "little"), layout.PROC_NUM)
        for index, pid in enumerate(pids):
            start = layout.slot_at(index)
            os.pwrite(file.fileno(), pid.to_bytes(4, "little") * 2, start)
            os.pwrite(file.fileno(), (1).to_bytes(4, "little"), start + layout.SLOT_STATUS)


def _backend(folder: Path) -> HamiCore:
    library = folder / "libvgpu.so"
    return HamiCore(
        library_path=library,
        library_sha256=build(library),
        library_dir=folder / "lib",
        run_dir=folder / "run",
        pid_in_container_of=lambda pid: pid,
    )


def _running(n: int, processes: int) -> RunningContainer:
    tenant = gpu_share(f"{n:016x}")
    pids = tuple(range(1 + n * processes, 1 + (n + 1) * processes))
    container = Container(id=f"{n}", pod=("bench", f"p{n}"), pod_uid=f"{n}", name="main")
    return RunningContainer(tenant=tenant, container=container, pids=pids, gpu_pids=frozenset(pids))


if __name__ == "__main__":
    figures.main(measure, __doc__, regions=200, processes=2)
