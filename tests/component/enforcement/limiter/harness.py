"""Tenants on the fake GPUs of tests/data/limiter, with the library preloaded, and the pages that they share."""

import contextlib
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.common.proc import first_stack
from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.limiter.page_files import PageFiles, page_path
from gpumgr.enforcement.limiter.pages import PageLimits
from tools.limiter import ARBITER, LIBRARY, SHARED, SOURCES, compile_library, compile_program

MIB = 1 << 20
#: What a context of the fake GPU takes (gpu.h).
CONTEXT_BYTES = 518 * MIB
GPU_BYTES = 143_771 * MIB
TWO_GPUS: Final = pytest.mark.parametrize("node", [{"gpus": 2}], indirect=True, ids=["gpus"])
#: The C sources of the fake GPU and of programs for it.
PROGRAMS = Path(__file__).parents[3] / "data" / "limiter"
ADDRESSES = "address,undefined"
#: The libraries are compiled with these sanitizers of gcc: ADDRESSES or "thread".
_SANITIZERS = os.environ.get("GPUMGR_SANITIZERS", "")
_REPORT = "sanitizer"
#: For cuda.c: it sees where each call of the driver begins.
FAKE_CUDA = ("-finstrument-functions", "-finstrument-functions-exclude-file-list=gpu.h,clock.h")


def compile_all(folder: Path, command: Sequence[str] | None = None) -> None:
    """Compiles the fake driver, the model clock, the tenant and the limiter's libraries into `folder`. `command`: as compile_program's."""
    for name, source, options in (
        ("libcuda.so.1", "cuda.c", (*SHARED, *FAKE_CUDA, "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")),
        ("libnvidia-ml.so.1", "nvml.c", (*SHARED, "-Wl,-Bsymbolic", "-Wl,-soname,libnvidia-ml.so.1")),
        ("libclock.so", "clock.c", ("-fPIC", "-shared")),
        ("make_clock", "clock.c", ("-DMAKE",)),
        ("make_gpu", "make_gpu.c", ()),
        ("tenant", "tenant.c", ()),
    ):
        compile_program(folder / name, [PROGRAMS / source], options, command)
    compile_program(folder / "edges", [PROGRAMS / "edges.c", folder / "libcuda.so.1"], (), command)
    compile_library(LIBRARY, folder, ['-DPLACE="pages/"', *sanitized(_SANITIZERS)], command)
    compile_library(ARBITER, folder, sanitized(_SANITIZERS), command)


def sanitized(sanitizers: str) -> Sequence[str]:
    """The compiler's options. ThreadSanitizer does not know fences; the arbiter's is for processes, not for threads."""
    return (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-Wno-tsan") if sanitizers else ()


def preloaded(libraries: Sequence[Path], folder: Path, sanitizers: str = _SANITIZERS) -> Mapping[str, str]:
    """The environment of a process with these libraries. Its sanitizer writes what it finds into `folder`."""
    # ThreadSanitizer would ask the model clock, which it observes, for the time at which it gives memory back. A child may use CUDA.
    options = f"log_path={folder / _REPORT}:detect_leaks=0:allocator_release_to_os_interval_ms=-1:die_after_fork=0"
    runtime, variable = {"": ("", ""), "thread": ("libtsan.so", "TSAN_OPTIONS")}.get(sanitizers, ("libasan.so", "ASAN_OPTIONS"))
    if not runtime:
        return {"LD_PRELOAD": ":".join(map(str, libraries))}
    found = subprocess.run(["cc", f"-print-file-name={runtime}"], check=True, capture_output=True, text=True).stdout.strip()
    return {"LD_PRELOAD": ":".join([found, *map(str, libraries)]), variable: options}


def hooks() -> Sequence[tuple[str, str, bool]]:
    """The hooked functions: symbol, name for cuGetProcAddress, and whether it has a wrapper."""
    lines = ("-DHOOK(symbol, base, ...)=@symbol base 1", "-DPASS(symbol, base, ...)=@symbol base 0")
    table = subprocess.run(["cc", "-E", "-P", *lines, SOURCES / "hooks.h"], check=True, capture_output=True, text=True).stdout
    return [(symbol, base, wrapped == "1") for symbol, base, wrapped in re.findall(r'@(\w+) "(\w+)" ([01])', table)]


@dataclass(frozen=True)
class Target:
    """What compile_all made for one architecture. `command`: of its compiler; `runner`: the words before a program's own command."""

    programs: Path
    command: Sequence[str] | None = None
    runner: Sequence[str] = ()

    def run(
        self, program: Path, preload: Sequence[Path], libraries: Path, folder: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program in `folder` with these libraries preloaded, and another folder of libraries."""
        variables = [f"LD_PRELOAD={':'.join(map(str, preload))}", f"LD_LIBRARY_PATH={libraries}"]
        words = [*self.runner, *(word for each in variables for word in ("-E", each))] if self.runner else ["env", *variables]
        return subprocess.run([*words, program], check=False, capture_output=True, text=True, cwd=folder)


@dataclass
class Node:
    """Fake GPUs of `gpu_bytes` each for all tenants of a test. `programs`: what compile_all made; `checkpoint_speed`: how many times
    faster than an H200 memory is moved out and back."""

    programs: Path
    folder: Path
    gpu_bytes: int = GPU_BYTES
    gpus: int = 1
    checkpoint_speed: int = 1000
    _running: list["Process"] = field(default_factory=list)
    _containers: int = 0

    def __post_init__(self) -> None:
        subprocess.run(
            [self.programs / "make_gpu", self.folder / "gpu", str(self.gpus), str(self.gpu_bytes)],
            check=True,
            env={**os.environ, "FAKE_CHECKPOINT_SPEED": str(self.checkpoint_speed)},
        )
        subprocess.run([self.programs / "make_clock", self.folder / "clock"], check=True)

    def container(self, share: int = 0, ceiling: int = 0, gpus: int = 1, *, limit_bytes: int = 0) -> "Container":
        """A new one, as `Container` has it."""
        self._containers += 1
        return Container(self.folder / str(self._containers), limit_bytes, share, ceiling, gpus)

    def containers(self, *shares: int, ceiling: int = 0, gpus: int = 1) -> "list[Container]":
        """One for each share; `ceiling`: in percent, 0: the share."""
        return [self.container(share, ceiling, gpus) for share in shares]

    def start(
        self, container: "Container | Path | None" = None, lookup: str = "proc", *, clock: bool = False, **environment: str
    ) -> "Tenant":
        """A tenant in a container, or in a folder that has one's pages; without one, it has the bare driver. `clock`: its time is the
        model clock's."""
        folder = container.folder if isinstance(container, Container) else container
        environment = {**self.environment(limited=container is not None, clock=clock), **environment}
        self._running.append(tenant := Tenant([self.programs / "tenant", lookup], environment, folder or self.folder))
        return tenant

    def started(
        self, container: "Container | Path | None" = None, lookup: str = "proc", gpu: int = 0, *, clock: bool = True
    ) -> "Tenant":
        """A tenant with a context."""
        tenant = self.start(container, lookup, clock=clock)
        assert tenant.ask(f"init {gpu}")[0] == 0
        return tenant

    def environment(self, *, limited: bool, clock: bool = False) -> Mapping[str, str]:
        """That of a process; `limited`: with the library."""
        preload = [self.programs / "libclock.so"] * clock + [self.programs / LIBRARY] * limited
        return {
            **preloaded(preload, self.folder),
            "LD_LIBRARY_PATH": str(self.programs),
            "FAKE_GPU": str(self.folder / "gpu"),
            "MODEL_CLOCK": str(self.folder / "clock"),
        }

    def fail_steps(self, lines: str) -> None:
        """Lets steps of checkpoints fail: lines of cuda.c's file."""
        (self.folder / "gpu.fails").write_text(lines)

    def used_bytes(self) -> int:
        """What the driver gave to all processes, without its own reserve."""
        _, free, total, _ = self.start().numbers("nvml")
        return total - free - 615 * MIB

    def arbitrate(
        self, containers: "Sequence[Container]", away_seconds: float = 0, tenants: int = 0, *, stops: bool = False
    ) -> "Arbiter":
        """Starts an arbiter for these containers; its time is the model clock's."""
        words = ["stop" if stops else "kill", str(away_seconds), str(tenants or len(containers))]
        words += [f"{container.gpus}:{container.folder}" for container in containers]
        environment = {**preloaded([self.programs / "libclock.so"], self.folder), "MODEL_CLOCK": str(self.folder / "clock")}
        command = [sys.executable, "-c", _ARBITER, str(self.programs / ARBITER), *words]
        self._running.append(arbiter := Arbiter(command, environment, self.folder))
        assert arbiter.line() == "\n", "the arbiter's process has ended"
        return arbiter

    def arbitrated(self, containers: "Sequence[Container]") -> "tuple[Arbiter, list[Tenant]]":
        """An arbiter, and a tenant with a context in each container."""
        return self.arbitrate(containers), [self.started(container) for container in containers]

    def close(self) -> None:
        for process in self._running:
            process.kill()
        reports = [path.read_text(errors="replace") for path in self.folder.glob(f"{_REPORT}.*")]
        assert not reports, "\n".join(reports)


class Pages:
    """The pages in a folder; `limits`, `use` and `turn` are the memory that the container's processes have, in the product's layouts."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def path(self, page: str) -> Path:
        return page_path(self.place, page)

    @property
    def limits(self) -> Any:
        return self._mapped("limits")

    @property
    def use(self) -> Any:
        return self._mapped("use")

    @property
    def turn(self) -> Any:
        return self._mapped("turn")

    def _mapped(self, page: str) -> Any:
        with self.path(page).open("r+b") as file:
            return pages.LAYOUTS[page].from_buffer(mmap.mmap(file.fileno(), 0))

    def reserved_bytes(self, gpu: int = 0) -> int:
        return int(self.use.gpu[gpu].reserved_bytes)

    def by_kind(self) -> Mapping[str, int]:
        """Bytes by kind, over all slots; without kinds that have none."""
        sums = Counter[str]()
        for slot in self.use.slot:
            if slot.pid:
                sums.update(dict(zip((*pages.KINDS, "spare"), slot.gpu[0].bytes, strict=True)))
        return {kind: size for kind, size in sums.items() if size}

    def claim_work(self, seconds: int) -> None:
        """Writes what a process with work on the GPU would write, for so long: a stamp may lie in the future."""
        turn = self.turn.gpu[0]
        turn.slots, turn.word[0] = 1, ((time.monotonic_ns() + seconds * 1_000_000_000 >> 24) & 0xFFFFFF) << 8 | 3

    def take_all_slots(self) -> None:
        """As processes that live but do nothing: this one."""
        use, namespace = self.use, os.stat("/proc/self/ns/pid").st_ino
        use.slots = pages.SLOTS
        for slot in use.slot:
            slot.pid, slot.state, slot.pid_namespace = os.getpid(), 1, namespace


class Container(Pages):
    """The pages of one container, in a folder of its own, for the first GPUs of the node. `limit_bytes`: 0 is no limit; `share_percent`:
    0 is none.
    """

    def __init__(
        self, folder: Path, limit_bytes: int = 0, share_percent: int = 0, ceiling_percent: int = 0, gpus: int = 1
    ) -> None:
        super().__init__(folder / "pages")
        self.folder, self.gpus = folder, gpus
        self.place.mkdir(parents=True)
        limits = [
            PageLimits(
                uuid=str(uuid.UUID(int=gpu + 1)),
                memory_bytes=limit_bytes,
                share_percent=share_percent,
                ceiling_percent=max(share_percent, ceiling_percent),
                quantum_microseconds=20_000,
                context_bytes=CONTEXT_BYTES,
            )
            for gpu in range(gpus)
        ]
        PageFiles.create(self.place, limits).close()

    def damage(self, how: str) -> None:
        """Does once to the turn page what a hostile process can do: random, zero, truncated, grown, claim (of work), grant (a turn)."""
        page = self.path("turn")
        if how == "claim":
            self.claim_work(seconds=1)
        elif how == "truncated":
            os.truncate(page, 100)
        elif how == "grown":
            os.truncate(page, 1 << 30)
        else:
            size = pages.Turn.gpu.offset + 64 + 4096
            content = {"random": os.urandom(size), "zero": bytes(size), "grant": b"\xff" * 7}[how]
            with page.open("r+b") as file:
                file.seek(pages.Turn.gpu.offset if how == "grant" else 0)
                file.write(content)


_ARBITER = """
import ctypes, os, signal, sys, time
library, how, clock = ctypes.CDLL(sys.argv[1]), sys.argv[2], ctypes.CDLL(None)
away_seconds, tenants = float(sys.argv[3]), int(sys.argv[4])

def start():
    numbers, threads = [], clock.model_threads()
    for word in sys.argv[5:]:
        gpus, folder = word.split(":", 1)
        pages = [os.open(f"{folder}/pages/{page}.1", os.O_RDWR) for page in ("limits", "turn")]
        numbers += [library.gm_arbiter_add(gpu, gpu, *pages) for gpu in range(int(gpus))]
    assert library.gm_arbiter_start() == 0
    while clock.model_threads() == threads:
        pass  # until its thread takes part in the model clock
    return numbers

if away_seconds:
    ready, started = os.pipe()
    first = os.fork()
    if not first:
        clock.prctl(1, signal.SIGKILL)
        signal.signal(signal.SIGUSR1, lambda *_: clock.model_stop())
        start()
        os.write(started, b" ")
        while True:
            signal.pause()
    os.read(ready, 1)
    print(flush=True)
    clock.model_enter(tenants + 1)
    time.sleep(5)
    os.kill(first, signal.SIGUSR1 if how == "stop" else signal.SIGKILL)
    while not os.waitpid(first, os.WUNTRACED | os.WNOHANG)[0]:
        time.sleep(1e-5)
    time.sleep(away_seconds)
    if how == "stop":
        os.kill(first, signal.SIGCONT)
    numbers = [] if how == "stop" else start()
    clock.model_leave()
else:
    numbers = start()
    print(flush=True)
figures = (ctypes.c_uint64 * 4)()
while request := sys.stdin.readline():
    if request.strip():
        library.gm_arbiter_remove(numbers[int(request)])
    line = []
    for number in numbers:
        library.gm_arbiter_figures(number, figures)
        line += list(figures)
    print(*line, flush=True)
"""


class Process:
    """A program that answers the lines that it is sent by lines of numbers."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], folder: Path) -> None:
        pipe, environment = subprocess.PIPE, {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        return self._stdout.readline()

    def send(self, command: str) -> None:
        self._stdin.write(command + "\n")
        self._stdin.flush()

    def answer(self) -> tuple[int, ...]:
        return tuple(map(int, self.line().split()))

    def numbers(self, command: str) -> tuple[int, ...]:
        self.send(command)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Arbiter(Process):
    """A process that loads the arbiter as the agent does. If it is to be away, it is killed or stopped five seconds after so many tenants
    and one more have begun to work. One that was stopped has no figures.
    """

    def figures(self) -> list[tuple[int, int, int]]:
        """By container and GPU: the time that it was charged, in ns, its overruns, and how often its turn page was restored."""
        numbers = self.numbers("")
        return list(zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True))

    def waited_seconds(self) -> list[float]:
        """By container and GPU: in which at least one thread waited for a turn."""
        return [waited_ns / 1e9 for waited_ns in self.numbers("")[3::4]]

    def remove(self, number: int) -> None:
        """Forgets a container, by its number among those of one GPU."""
        self.numbers(str(number))

    def reads(self) -> int:
        """How often its thread has read pages."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            if (thread / "comm").read_text() == "gpumgr-arbiter\n":
                return int((thread / "io").read_text().split("syscr: ")[1].split()[0])
        raise AssertionError("the arbiter's thread has ended")


class Tenant(Process):
    """A process of tenant.c, which documents the commands."""

    def ask(self, command: str) -> tuple[int, int, int]:
        """The CUresult and two numbers."""
        result, first, second = self.numbers(command)
        return result, first, second

    def gpu_percent(self) -> float:
        """The GPU time of the work that was sent to it."""
        result, gpu, elapsed = self.answer()
        assert result == 0
        return 100 * gpu / elapsed

    def has_answered(self, seconds: float) -> bool:
        """Whether an answer comes within this time."""
        return bool(select.select([self._stdout], [], [], seconds)[0])

    def await_program(self, name: str) -> None:
        """Until it executes this program: the kernel sets the name before the stack, by which the agent notices an exec."""
        comm = Path(f"/proc/{self.pid}/comm")
        while comm.read_text() != f"{name}\n" or first_stack(self.pid) is None:
            time.sleep(0.001)

    def cpu_seconds(self) -> float:
        """That its threads have used."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def resume(self) -> None:
        """After a stop."""
        self._process.send_signal(signal.SIGCONT)


def gpu_time_percent(
    tenants: Sequence[Tenant], *works: str, threads: int = 1, others: int = 0, milliseconds: int = 10_000
) -> list[float]:
    """The GPU time of tenants that work at the same time; a single work is all tenants'. `others`: more processes that take part in the
    model clock."""
    for tenant, work in zip(tenants, works if len(works) > 1 else works * len(tenants), strict=True):
        tenant.send(f"work {work} {milliseconds} {len(tenants) * threads + others} {threads}")
    return [tenant.gpu_percent() for tenant in tenants]
