"""Tenants on the fake GPUs of tests/data/limiter, with the library preloaded, and the pages that they share."""

import contextlib
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpumgr.common.proc import first_stack
from tools.limiter import ARBITER, LIBRARY, SHARED, SOURCES, compile_library, compile_program

MIB = 1 << 20
#: What a context of the fake GPU takes (gpu.h).
CONTEXT_BYTES = 518 * MIB
GPU_BYTES = 143_771 * MIB
KINDS = ("alloc", "managed", "array", "vmm", "pool", "graph", "context", "spare")
#: The C sources of the fake GPU and of programs for it.
PROGRAMS = Path(__file__).parents[3] / "data" / "limiter"
ADDRESSES = "address,undefined"
#: The libraries are compiled with these sanitizers of gcc: ADDRESSES or "thread".
_SANITIZERS = os.environ.get("GPUMGR_SANITIZERS", "")
_REPORT = "sanitizer"
#: For cuda.c: it sees where each call of the driver begins.
FAKE_CUDA = ("-finstrument-functions", "-finstrument-functions-exclude-file-list=gpu.h,clock.h")
# Layouts of pages.h.
_MAGIC, _VERSION, _GPUS, _SLOTS = 0x4D475047, 1, 16, 1024
_HEAD, _GPU_USE, _SLOT = 64, 64, 64 + _GPUS * 128


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
    _running: list["Tenant"] = field(default_factory=list)
    _arbiters: list["Arbiter"] = field(default_factory=list)

    def __post_init__(self) -> None:
        subprocess.run(
            [self.programs / "make_gpu", self.folder / "gpu", str(self.gpus), str(self.gpu_bytes)],
            check=True,
            env={**os.environ, "FAKE_CHECKPOINT_SPEED": str(self.checkpoint_speed)},
        )
        subprocess.run([self.programs / "make_clock", self.folder / "clock"], check=True)

    def start(
        self,
        container: "Container | Path | None" = None,
        lookup: str = "proc",
        *,
        clock: bool = False,
        visible: str | None = None,
    ) -> "Tenant":
        """A tenant in a container, or in a folder that has one's pages; without one, it has the bare driver. `clock`: its time is the
        model clock's. `visible`: its CUDA_VISIBLE_DEVICES."""
        folder = container.folder if isinstance(container, Container) else container
        environment = dict(self.environment(limited=container is not None, clock=clock))
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        tenant = Tenant(self.programs / "tenant", lookup, environment, folder or self.folder)
        self._running.append(tenant)
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
        with_driver = self.start()
        with_driver.send("nvml")
        _, free, total, _ = with_driver.answer()
        return total - free - 615 * MIB

    def arbitrate(
        self, containers: "Sequence[Container]", away_seconds: float = 0, tenants: int = 0, *, stops: bool = False
    ) -> "Arbiter":
        """Starts an arbiter for these containers; its time is the model clock's."""
        away = ("stop" if stops else "kill", away_seconds, tenants or len(containers))
        self._arbiters.append(Arbiter(self.programs, self.folder, containers, *away))
        return self._arbiters[-1]

    def close(self) -> None:
        for arbiter in self._arbiters:
            arbiter.kill()
        for tenant in self._running:
            tenant.kill()
        reports = [path.read_text(errors="replace") for path in self.folder.glob(f"{_REPORT}.*")]
        assert not reports, "\n".join(reports)


def claim_work(turn: Path, seconds: int) -> None:
    """Writes what a process with work on the GPU would write, for so long: a stamp may lie in the future."""
    stamp = (time.monotonic_ns() + seconds * 1_000_000_000 >> 24) & 0xFFFFFF
    _overwrite(turn, _HEAD + 24, struct.pack("<I", 1))
    _overwrite(turn, _HEAD + 64, struct.pack("<I", stamp << 8 | 3))


def take_all_slots(use: Path) -> None:
    """As processes that live but do nothing: this one."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    _overwrite(use, 8, struct.pack("<I", _SLOTS))
    for slot in range(_SLOTS):
        _overwrite(use, _HEAD + _GPUS * _GPU_USE + slot * _SLOT, struct.pack("<IIQ", os.getpid(), 1, namespace))


def _overwrite(page: Path, offset: int, content: bytes) -> None:
    with page.open("r+b") as file:
        file.seek(offset)
        file.write(content)


class Container:
    """The pages of one container, in a folder of its own, for the first GPUs of the node. `limit_bytes`: 0 is no limit; `share_percent`:
    0 is none.
    """

    def __init__(
        self, folder: Path, limit_bytes: int = 0, share_percent: int = 0, ceiling_percent: int = 0, gpus: int = 1
    ) -> None:
        self.folder, self.gpus = folder, gpus
        (folder / "pages").mkdir(parents=True)
        cores = (share_percent, max(share_percent, ceiling_percent), 20_000, 0)
        page = struct.pack("<IIII48x", _MAGIC, _VERSION, gpus, 0)
        for gpu in range(gpus):
            page += struct.pack("<16sQQQIIII64x", bytes([0] * 15 + [gpu + 1]), limit_bytes, 0, CONTEXT_BYTES, *cores)
        self._write("limits", page, _HEAD + _GPUS * 120)
        self._write("use", struct.pack("<II", _MAGIC, _VERSION), _HEAD + _GPUS * _GPU_USE + _SLOTS * _SLOT)
        self._write("turn", struct.pack("<II", _MAGIC, _VERSION), _HEAD + _GPUS * (64 + _SLOTS * 4))

    def page(self, name: str) -> Path:
        return self.folder / "pages" / f"{name}.{_VERSION}"

    def _write(self, name: str, content: bytes, size: int) -> None:
        self.page(name).write_bytes(content.ljust(size, b"\0"))

    def set_limit(self, gpu: int, size_bytes: int) -> None:
        _overwrite(self.page("limits"), _HEAD + 120 * gpu + 16, struct.pack("<Q", size_bytes))

    def set_uncounted(self, size_bytes: int) -> None:
        """What the agent writes about the driver's use beyond the count."""
        _overwrite(self.page("limits"), _HEAD + 24, struct.pack("<Q", size_bytes))

    def beat_for_ever(self) -> None:
        """As if an arbiter were alive that never gives the container a turn."""
        _overwrite(self.page("limits"), 16, struct.pack("<Q", 1 << 62))

    def request_resume(self, word: int) -> None:
        """Writes what a process writes that waits for the end of a suspension."""
        _overwrite(self.page("use"), 12, struct.pack("<I", word))

    def damage(self, how: str) -> None:
        """Does once to the turn page what a hostile process can do: random, zero, truncated, grown, claim (of work), grant (a turn)."""
        page = self.page("turn")
        if how == "claim":
            claim_work(page, seconds=1)
        elif how == "truncated":
            os.truncate(page, 100)
        elif how == "grown":
            os.truncate(page, 1 << 30)
        else:
            size = _HEAD + 64 + 4096
            content = {"random": os.urandom(size), "zero": bytes(size), "grant": b"\xff" * 7}[how]
            with page.open("r+b") as file:
                file.seek(_HEAD if how == "grant" else 0)
                file.write(content)

    def is_whole(self) -> bool:
        """Is the turn page as the library expects it?"""
        page = self.page("turn").read_bytes()
        return struct.unpack_from("<II", page) == (_MAGIC, _VERSION) and len(page) == _HEAD + _GPUS * (64 + _SLOTS * 4)

    def wants_or_has_work(self) -> bool:
        """What its first process says to the arbiter."""
        return bool(struct.unpack_from("<I", self.page("turn").read_bytes(), _HEAD + 64)[0] & 3)

    def turns(self) -> int:
        """The futex word that processes watch while they sleep."""
        return int(struct.unpack_from("<I", self.page("turn").read_bytes(), _HEAD + 16)[0])

    def holds_a_turn_after(self, turns: int) -> bool:
        """Does it hold the turn, after so many before?"""
        since, grants = struct.unpack_from("<QI", self.page("turn").read_bytes(), _HEAD + 8)
        return bool(since) and int(grants) > turns

    def part_while_away(self, gpu: int = 0) -> tuple[int, int]:
        """The part of the time that it uses without an arbiter, in percent: where it begins, and its share."""
        share, begin = struct.unpack_from("<I12xI", self.page("limits").read_bytes(), _HEAD + 120 * gpu + 40)
        return int(begin) - 1, int(share)

    def reserved_bytes(self, gpu: int = 0) -> int:
        return int(struct.unpack_from("<Q", self.page("use").read_bytes(), _HEAD + gpu * _GPU_USE)[0])

    def empty_by_first(self) -> None:
        """Makes the first slot one that its process has taken from a dead one, and has not emptied yet."""
        at = _HEAD + _GPUS * _GPU_USE
        _overwrite(self.page("use"), at + 4, struct.pack("<I", 0))
        _overwrite(self.page("use"), at + 64 + 72, struct.pack("<Q", 1))

    def fault(self) -> str:
        """Why the library does not limit the first process."""
        at = _HEAD + _GPUS * _GPU_USE
        state, text = struct.unpack_from("<4xI8x48s", self.page("use").read_bytes(), at)
        return text.rstrip(b"\0").decode() if state == 2 else ""

    def launches(self) -> int:
        """How many the first process says it has made."""
        return int(struct.unpack_from("<Q", self.page("use").read_bytes(), _HEAD + _GPUS * _GPU_USE + 64 + 64)[0])

    def unknown_versions(self) -> int:
        """How many versions of functions the first process asked for that the library does not know."""
        return int(struct.unpack_from("<Q", self.page("use").read_bytes(), _HEAD + _GPUS * _GPU_USE + 64 + 88)[0])

    def by_kind(self) -> Mapping[str, int]:
        """Bytes by kind, over all slots; without kinds that have none."""
        page = self.page("use").read_bytes()
        sums = dict.fromkeys(KINDS, 0)
        for slot in range(_SLOTS):
            at = _HEAD + _GPUS * _GPU_USE + slot * _SLOT
            if struct.unpack_from("<I", page, at)[0]:
                for kind, size in zip(KINDS, struct.unpack_from("<8Q", page, at + 64), strict=True):
                    sums[kind] += size
        return {kind: size for kind, size in sums.items() if size}


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


class Arbiter:
    """A process that loads the arbiter as the agent does. With `away_seconds` it is killed or stopped (`how`) five seconds after so many
    `tenants` and one more have begun to work, and is away for so long. One that was stopped has no figures.
    """

    def __init__(
        self, programs: Path, folder: Path, containers: Sequence[Container], how: str, away_seconds: float, tenants: int
    ) -> None:
        words = [str(programs / ARBITER), how, str(away_seconds), str(tenants)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ARBITER, *words, *(f"{container.gpus}:{container.folder}" for container in containers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **preloaded([programs / "libclock.so"], folder), "MODEL_CLOCK": str(folder / "clock")},
        )
        self._answer()

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the arbiter's process ended with status {self._process.wait()}"
        return [int(word) for word in line.split()]

    def figures(self) -> list[tuple[int, int, int]]:
        """By container and GPU: the time that it was charged, in ns, its overruns, and how often its turn page was restored."""
        numbers = self._numbers()
        return list(zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True))

    def waited_seconds(self) -> list[float]:
        """By container and GPU: in which at least one thread waited for a turn."""
        return [waited_ns / 1e9 for waited_ns in self._numbers()[3::4]]

    def remove(self, number: int) -> None:
        """Forgets a container, by its number among those of one GPU."""
        self._numbers(str(number))

    def _numbers(self, request: str = "") -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._answer()

    def reads(self) -> int:
        """How often its thread has read pages."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            if (thread / "comm").read_text() == "gpumgr-arbiter\n":
                return int((thread / "io").read_text().split("syscr: ")[1].split()[0])
        raise AssertionError("the arbiter's thread has ended")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Tenant:
    """A process of tenant.c, which documents the commands."""

    def __init__(self, program: Path, lookup: str, environment: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            [program, lookup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> tuple[int, ...]:
        assert self._process.stdout is not None
        return tuple(map(int, self._process.stdout.readline().split()))

    def has_answered(self, seconds: float) -> bool:
        """Whether an answer comes within this time."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def ask(self, command: str) -> tuple[int, int, int]:
        """The CUresult and two numbers."""
        self.send(command)
        result, first, second = self.answer()
        return result, first, second

    def await_program(self, name: str) -> None:
        """Until it executes this program: the kernel sets the name before the stack, by which the agent notices an exec."""
        comm = Path(f"/proc/{self.pid}/comm")
        while comm.read_text() != f"{name}\n" or first_stack(self.pid) is None:
            time.sleep(0.001)

    def cpu_seconds(self) -> float:
        """That its threads have used."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def resume(self) -> None:
        """After a stop."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def containers_of(folder: Path, shares: Sequence[int], ceiling: int = 0, gpus: int = 1) -> list[Container]:
    """One for each share; `ceiling`: in percent, 0: the share."""
    return [
        Container(folder / str(number), share_percent=share, ceiling_percent=ceiling, gpus=gpus)
        for number, share in enumerate(shares)
    ]


def started(node: Node, container: Container | None, lookup: str = "proc", gpu: int = 0) -> Tenant:
    """A tenant with a context. Its time is the model clock's."""
    tenant = node.start(container, lookup, clock=True)
    assert tenant.ask(f"init {gpu}")[0] == 0
    return tenant


def arbitrated(node: Node, containers: Sequence[Container]) -> tuple[Arbiter, list[Tenant]]:
    """An arbiter, and a tenant in each container."""
    return node.arbitrate(containers), [started(node, container) for container in containers]


def gpu_time_percent(
    tenants: Sequence[Tenant], works: Sequence[str], threads: int = 1, others: int = 0, milliseconds: int = 10_000
) -> list[float]:
    """The GPU time of tenants that work at the same time. `others`: more processes that take part in the model clock."""
    for tenant, work in zip(tenants, works, strict=True):
        tenant.send(f"work {work} {milliseconds} {len(tenants) * threads + others} {threads}")
    answers = [tenant.answer() for tenant in tenants]
    assert [result for result, _, _ in answers] == [0] * len(tenants)
    return [100 * gpu / elapsed for _, gpu, elapsed in answers]
