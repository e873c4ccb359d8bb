"""Measures libgpumgr.so and the arbiter on this machine's first GPU, with PyTorch tenants. Run it as a module, as root, by a Python with
PyTorch and hatchling (tools/limiter.py); it needs gcc and unshare, and ends within 150 seconds. Each row is printed at once.

A tenant is a process in a mount namespace of its own, where /etc/gpumgr has the tenant's pages. A row shows what each tenant held of the
GPU's time, as the arbiter charged it, and its rate as a part of the rate of the bare driver. For memory, a program in C asks for each kind
until it is refused.
"""

import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.limiter import ARBITER, LIBRARY, compile_library, compile_program

_MEMORY_TENANT = Path(__file__).parents[1] / "data" / "limiter" / "tenant.c"
_TENANT = Path(__file__).with_name("torch_tenant.py")
_DEADLINE = time.monotonic() + 140
#: Layouts of pages.h.
_MAGIC, _VERSION, _GPUS, _SLOTS, _HEAD = 0x4D475047, 1, 16, 1024, 64
_LIMITS_GPU = "<16sQQQIIII64x"
_PAGE_BYTES = {
    "limits": _HEAD + _GPUS * 120,
    "use": _HEAD + _GPUS * 64 + _SLOTS * (64 + _GPUS * 128),
    "turn": _HEAD + _GPUS * (64 + _SLOTS * 4),
}
_MIB = 1 << 20
_MEMORY_LIMIT_BYTES = 4096 * _MIB
_MEMORY_KINDS = ("alloc", "managed", "pitch", "array", "vmm", "async", "pool")
_QUANTUM_US = int(os.environ.get("QUANTUM_US", "20000"))
#: Load, seconds, shares of the tenants that run at the same time; 0: not limited.
_ROWS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("products", 5, (25, 75)),
    ("products", 5, (20, 30, 50)),
    ("products", 5, (25,)),
    ("products", 5, (50,)),
    ("products", 5, (75,)),
    ("small", 5, (25,)),
    ("small", 5, (50,)),
    ("graph", 5, (25, 75)),
    ("small", 3, (0,)),
    ("small", 3, (100,)),
    ("products", 3, (100,)),
    ("small", 5, (25, 75)),
    ("graph", 4, (50,)),
)


def _say(*words: object) -> None:
    print(f"{time.monotonic() - (_DEADLINE - 140):6.1f}", *words, flush=True)


def may_mount() -> bool:
    """Where not, each tenant gets a library that looks for its pages in their own folder."""
    return subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], check=False).returncode == 0


def first_gpu() -> bytes:
    cuda = ctypes.CDLL("libcuda.so.1")
    uuid = (ctypes.c_ubyte * 16)()
    for result in (cuda.cuInit(0), cuda.cuDeviceGetUuid_v2(uuid, 0)):
        if result:
            sys.exit(f"the driver answers {result}")
    return bytes(uuid)


class Pages:
    """A tenant's pages."""

    def __init__(self, folder: Path, uuid: bytes) -> None:
        self.folder = folder
        self._uuid = uuid
        folder.mkdir()
        for name, size in _PAGE_BYTES.items():
            head = struct.pack("<III", _MAGIC, _VERSION, 1 if name == "limits" else 0)
            (folder / f"{name}.{_VERSION}").write_bytes(head.ljust(size, b"\0"))
        self.descriptors = [os.open(folder / f"{name}.{_VERSION}", os.O_RDWR) for name in ("limits", "turn")]
        self.set_share(0)

    def set_share(self, percent: int, memory_bytes: int = 0) -> None:
        limits = struct.pack(_LIMITS_GPU, self._uuid, memory_bytes, 0, 0, percent, percent, _QUANTUM_US, 0)
        os.pwrite(self.descriptors[0], limits, _HEAD)

    def state(self) -> str:
        until, since, grants, drains, slots = struct.unpack("<QQIII", os.pread(self.descriptors[1], 28, _HEAD))
        words = struct.unpack("<4I", os.pread(self.descriptors[1], 16, _HEAD + 64))
        now = time.monotonic_ns()
        beat = struct.unpack("<Q", os.pread(self.descriptors[0], 8, 16))[0]
        return (
            f"until {(until - now) / 1e6 if until else 0:.1f} ms, since {(now - since) / 1e6 if since else 0:.1f} ms, grants {grants}, "
            f"drains {drains}, slots {slots}, flags {[word & 255 for word in words]}, heartbeat {(now - beat) / 1e6:.1f} ms old"
        )

    def launches(self) -> int:
        """The first process has made so many."""
        return self._use(_GPUS * 64 + 64 + 64)

    def reserved_bytes(self) -> int:
        return self._use(0)

    def suspend(self, suspended: int) -> None:
        if suspended:
            with (self.folder / f"use.{_VERSION}").open("r+b") as use:
                use.seek(12)
                use.write(bytes(4))
        os.pwrite(self.descriptors[0], struct.pack("<I", suspended), 12)

    def resume_requested(self) -> bool:
        return any((self.folder / f"use.{_VERSION}").read_bytes()[12:16])

    def _use(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", (self.folder / f"use.{_VERSION}").read_bytes(), _HEAD + offset)[0])


class PagedTenant:
    """A tenant that has these pages, or none. `command`: of its program."""

    def __init__(
        self,
        name: str,
        pages: Pages | None,
        library: Path,
        *,
        mounts: bool = False,
        command: Sequence[str] = (sys.executable, str(_TENANT)),
    ) -> None:
        self.name = name
        self.pages = pages
        if pages and not mounts:
            compile_library(LIBRARY, pages.folder, [f'-DPLACE="{pages.folder}/"'])
            library = pages.folder / LIBRARY
            command = ["env", f"LD_PRELOAD={library}", *command]
        elif pages:
            script = 'mount --make-rprivate / && mount --bind "$0" /etc/gpumgr && exec env LD_PRELOAD="$1" "$2" "$3"'
            command = ["unshare", "-m", "sh", "-c", script, str(pages.folder), str(library), *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str, seconds: float) -> Mapping[str, Any]:
        """The answer; `error` where none came in time."""
        line, error = self.ask_line(command, seconds)
        return json.loads(line) if line else {"error": error}

    def ask_line(self, command: str, seconds: float) -> tuple[str, str]:
        """The answer, or why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdout, lines = self._process.stdout, []
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "", f"{self.name} ended with {self._process.wait()}"
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(seconds)
        if not lines:
            return "", f"{self.name} has not answered {command!r} within {seconds} s"
        return lines[0], "" if lines[0] else f"{self.name} ended with {self._process.wait()}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()


class _Measurement:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        compile_library(LIBRARY, folder)
        compile_library(ARBITER, folder)
        compile_program(folder / "tenant", [_MEMORY_TENANT])
        mounts = self._mounts = may_mount()
        _say("compiled; tenants have mount namespaces:", mounts)
        self._arbiter = ctypes.CDLL(str(folder / ARBITER))
        uuid = self._uuid = first_gpu()
        if mounts:
            Path("/etc/gpumgr").mkdir(exist_ok=True)
        library = folder / LIBRARY
        self._limited = [PagedTenant(f"t{n}", Pages(folder / f"t{n}", uuid), library, mounts=mounts) for n in range(3)]
        self._bare = PagedTenant("bare", None, folder)
        self._numbers: dict[str, int] = {}
        for tenant in self._limited:
            if tenant.pages:
                self._numbers[tenant.name] = self._arbiter.gm_arbiter_add(0, 0, *tenant.pages.descriptors)
        if self._arbiter.gm_arbiter_start():
            sys.exit("the arbiter does not start")
        self._rates: dict[str, float] = {}

    def run(self) -> None:
        for kind in _MEMORY_KINDS:
            self._memory(kind)
        for tenant, answer in self._ask([self._bare, *self._limited], "init", 90):
            _say(tenant.name, answer)
        for load in ("products", "small", "graph"):
            [(_, answer)] = self._ask([self._bare], f"{load} 3", 30)
            if "error" in answer:
                _say("bare", load, answer)
                continue
            self._rates[load] = answer["launches"] / answer["seconds"]
            _say(f"{load:9} bare driver: {self._rates[load]:.0f} launches per second")
        for load, seconds, shares in _ROWS:
            if time.monotonic() + seconds + 3 > _DEADLINE:
                _say("no time left for", load, shares)
            elif not self._row(load, seconds, shares):
                break

    def _memory(self, kind: str) -> None:
        """What a program gets of one kind, in steps of 64 MiB, of a limit in which the context is not counted."""
        pages = Pages(self._folder / kind, self._uuid)
        pages.set_share(0, _MEMORY_LIMIT_BYTES)
        program = (str(self._folder / "tenant"), "proc")
        tenant = PagedTenant(kind, pages, self._folder / LIBRARY, mounts=self._mounts, command=program)
        try:
            for command in ("init 0", f"grab {kind} {64 * _MIB} {2 * _MEMORY_LIMIT_BYTES}"):
                line, error = tenant.ask_line(command, 20)
            result, granted, _ = map(int, line.split()) if line else (-1, 0, 0)
            counted = pages.reserved_bytes()
            _say(
                f"memory {kind:8} got {granted // _MIB} of {_MEMORY_LIMIT_BYTES // _MIB} MiB, then {result};",
                f"counted {counted // _MIB} MiB, {max(0, counted - _MEMORY_LIMIT_BYTES)} bytes over the limit; {error}",
            )
        finally:
            tenant.kill()

    def _ask(self, tenants: Sequence[PagedTenant], command: str, seconds: float) -> list[tuple[PagedTenant, Mapping[str, Any]]]:
        answers: dict[str, Mapping[str, Any]] = {}

        def ask(tenant: PagedTenant) -> None:
            answers[tenant.name] = tenant.ask(command, seconds)

        threads = [threading.Thread(target=ask, args=(tenant,)) for tenant in tenants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [(tenant, answers[tenant.name]) for tenant in tenants]

    def _figures(self, tenant: PagedTenant) -> tuple[int, int, int]:
        """Nanoseconds held, overruns, nanoseconds waited."""
        figures = (ctypes.c_uint64 * 4)()
        self._arbiter.gm_arbiter_figures(self._numbers[tenant.name], figures)
        return figures[0], figures[1], figures[3]

    def _row(self, load: str, seconds: int, shares: Sequence[int]) -> bool:
        """False where a tenant has not answered."""
        tenants = self._limited[: len(shares)]
        for tenant, share in zip(tenants, shares, strict=True):
            assert tenant.pages
            tenant.pages.set_share(share)
        time.sleep(0.3)  # until all buckets are as after a rest
        before = {
            tenant.name: (*self._figures(tenant), tenant.pages.launches(), tenant.cpu_seconds())
            for tenant in tenants
            if tenant.pages
        }
        begun, own = time.monotonic_ns(), time.process_time()
        answers = self._ask(tenants, f"{load} {seconds}", seconds + 15)
        elapsed = time.monotonic_ns() - begun
        _say(
            f"{load:9} {'/'.join(map(str, shares)):9}",
            f"(arbiter: {100e9 * (time.process_time() - own) / elapsed:.1f} % of a core)",
        )
        for (tenant, answer), share in zip(answers, shares, strict=True):
            assert tenant.pages
            held, overruns, waited, launches, cpu = before[tenant.name]
            now_held, now_overruns, now_waited = self._figures(tenant)
            rate = answer.get("launches", 0) / answer.get("seconds", 1)
            _say(
                f"    {share:3} %: held {100 * (now_held - held) / elapsed:5.1f} %, rate {100 * rate / self._rates.get(load, 1):5.1f} %,",
                f"overruns {now_overruns - overruns}, launches {tenant.pages.launches() - launches},",
                f"waited {100 * (now_waited - waited) / elapsed:.1f} %,",
                f"CPU {100e9 * (tenant.cpu_seconds() - cpu) / elapsed:.0f} %, {answer.get('error', '')}",
            )
            if "error" in answer:
                _say(tenant.name, tenant.pages.state())
        return not any("error" in answer for _, answer in answers)

    def close(self) -> None:
        for tenant in (*self._limited, self._bare):
            tenant.kill()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measurement = _Measurement(Path(folder))
        try:
            measurement.run()
        finally:
            measurement.close()


if __name__ == "__main__":
    main()
