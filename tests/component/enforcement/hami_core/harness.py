"""The client of a region as a process, and a backend with the files that it needs."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from gpumgr.agent.ports import RunningContainer
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import Container
from tests.component.stage.stage import Clock
from tests.shares import gpu_share, shared_gpu

SOURCES = Path(__file__).resolve().parents[3] / "data" / "enforcement"
ID = "00112233445566ff"
MEMORY_BYTES = 1 << 30
CORES = 30


def tenant(allocation: str = ID, *, cores: int = CORES, memory_bytes: int = MEMORY_BYTES, priority: int = 1) -> GpuShare:
    return gpu_share(allocation, shared_gpu(cores=cores, memory_bytes=memory_bytes), priority=priority)


def running(of: GpuShare | None = None, *, pids: Sequence[int] = (), gpu_pids: Sequence[int] = ()) -> RunningContainer:
    container = Container(id="c", pod=("team", "p"), pod_uid="u", name="main")
    return RunningContainer(
        tenant=of or tenant(),
        container=container,
        pids=tuple(sorted(pids)),
        gpu_pids=frozenset(gpu_pids),
    )


def number_in_container(pid: int) -> int | None:
    """The last column of NSpid (proc(5))."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)


@dataclass(frozen=True)
class Client:
    """tests/data/enforcement/region_client.c"""

    program: Path

    def run(self, region: Path, *commands: object) -> list[str]:
        """What the commands said, one line for each, from a process that has ended."""
        command = [str(self.program), "-f", str(region), *map(str, commands)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.splitlines()

    @contextmanager
    def process(self, region: Path, *commands: object) -> Iterator[int]:
        """The number of a process that has done the commands, and runs."""
        command = [str(self.program), "-f", str(region), *map(str, commands), "wait"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "waiting\n" in process.stdout
            yield process.pid
            process.kill()

    @contextmanager
    def waiting(self, region: Path, *commands: object) -> Iterator["subprocess.Popen[str]"]:
        """A process that may wait for another one; it is given its time to end."""
        command = [str(self.program), "-f", str(region), *map(str, commands)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield process


def make_backend(folder: Path, library: Path, clock: Clock | None = None, *, volumes: BoundedFolders | None = None) -> HamiCore:
    return HamiCore(
        library_path=library,
        library_sha256=sha256(library.read_bytes()).hexdigest(),
        library_dir=folder / "lib",
        run_dir=folder / "run",
        pid_in_container_of=number_in_container,
        volumes=volumes,
        clock=clock or Clock(),
    )


def region_of(folder: Path, allocation: str = ID) -> Path:
    return folder / "run" / "hami-core" / allocation / "region.cache"
