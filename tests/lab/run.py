"""One run of the lab: its folder with the compiled fake GPU, and the removal of everything that it made on this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.e2e.processes import start_time

from .files import LabFiles

#: Every process of a run has this variable.
RUN_VARIABLE: Final = "LAB_RUN"
#: Short: paths of MPS sockets have 107 bytes at most.
_PREFIX: Final = "lab-"
#: The time at which the run's own process started.
_STARTED: Final = "started"
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_PATIENCE_SECONDS: Final = 10.0


class Run:
    """`name` is also the name of the run's cgroup below the root, and of its folder in the system's temporary folder."""

    def __init__(self, name: str, files: LabFiles) -> None:
        self.name, self.files = name, files
        self.folder = Path(tempfile.gettempdir()) / name
        self.fake, self.fake_for_mps = self.folder / "out", self.folder / "outx"
        self.driver_root, self.mps_server = self.folder / "droot", self.folder / "mps-server"
        self.roots = self.folder / "roots"

    @property
    def environ(self) -> Mapping[str, str]:
        """For each process that the run starts, over this process's environment."""
        return {RUN_VARIABLE: self.name, "XDG_CACHE_HOME": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}

    def mount_tmpfs(self, at: Path, size: str) -> None:
        at.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", self.name, str(at)], check=True)


@contextlib.contextmanager
def open_run(files: LabFiles, *, logs: Path | None = None) -> Iterator[Run]:
    """A run with the fake GPU compiled. Everything that it and killed runs left is removed, also after SIGINT and SIGTERM; `logs`: a
    folder that gets the logs of agents and containers."""
    for record in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_STARTED}"):
        pid = record.parent.name.removeprefix(_PREFIX)
        if pid.isdigit() and start_time(int(pid)) != record.read_text():
            _remove(record.parent)
    run = Run(f"{_PREFIX}{os.getpid()}", files)
    try:
        (run.folder / "tmp").mkdir(parents=True)
        (run.folder / _STARTED).write_text(start_time(os.getpid()) or "")
        run.folder.chmod(0o755)
        built = subprocess.run([str(files.fake / "build.sh"), str(run.folder)], capture_output=True, text=True)
        if built.returncode:
            raise RuntimeError(f"{files.fake}/build.sh failed with status {built.returncode}:\n{built.stderr}")
        shutil.copy(Path(__file__).with_name("tamper_region.py"), run.fake)
        run.mount_tmpfs(run.roots, "2g")
        yield run
    finally:
        if logs is not None:
            for log in (*run.folder.glob("*/agent.log"), *run.folder.glob("*/*.err"), *run.folder.glob("*.traceback")):
                kept = logs / log.relative_to(run.folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, kept)
        _remove(run.folder)


def _remove(folder: Path) -> None:
    """Containers, processes, mounts, cgroups, the folder. A second Ctrl-C has no effect until it is done."""
    with _undisturbed():
        for state in folder.glob("*/runc"):
            listed = subprocess.run(["runc", "--root", str(state), "list", "-q"], capture_output=True, text=True)
            for container in listed.stdout.split():
                subprocess.run(["runc", "--root", str(state), "delete", "-f", container], capture_output=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            _end(folder.name, number)
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((each for each in mounted if each.startswith(f"{folder}/")), reverse=True):
            subprocess.run(["umount", "-l", point], capture_output=True)
        for tree in (_CGROUP_ROOT, *_CGROUP_ROOT.iterdir()):
            for place, _, _ in os.walk(tree / folder.name, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(place)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(name: str, number: signal.Signals) -> None:
    """Sends the signal to the run's processes, by pid, and waits until they have ended."""
    for pid in _processes(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _processes(name) and time.monotonic() < deadline:
        time.sleep(0.1)


def _processes(name: str) -> list[int]:
    wanted, found = f"{RUN_VARIABLE}={name}".encode(), list[int]()
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (proc / "environ").read_bytes().split(b"\0") and start_time(int(proc.name)) is not None:
                found.append(int(proc.name))
    return found
