"""A Debian that its own systemd boots, in a container of systemd-nspawn: a host to install the agent on, thrown away when it stops.

Its root is made once and kept in the cache (`python -m tests.e2e.nspawn`), with a virtual environment that lacks only gpumgr itself.
"""

import asyncio
import hashlib
import inspect
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from gpumgr.common.units import VCUDA_NAMES
from gpumgr.sim.kubelet import SimContainer, SimKubelet, SimPod

from .build import alone_in
from .places import CGROUPS, PROJECT, cache
from .processes import Processes, end_recorded, start_time, wait_until

T = TypeVar("T")

#: Bookworm: Python 3.11, the oldest that gpumgr runs on, and systemd 252, which says how exposed a unit is.
SUITE: Final = "bookworm"
PACKAGES: Final = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv")
LEFT_OUT: Final = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
ENVIRONMENT: Final = Path("/opt/gpumgr")
#: Short: the kubelet's sockets lie below it.
STATE: Final = Path("/run/gpumgr-e2e-nspawn")
NAME: Final = "gpumgr-e2e-nspawn"
_BOOT_SECONDS: Final = 120
_STOP_SECONDS: Final = 20


def root() -> Path:
    """The root's folder; made first if what it is made of has changed (half a minute, network)."""
    inputs = [SUITE, *PACKAGES, *LEFT_OUT, (PROJECT / "requirements.lock").read_text(), inspect.getsource(_make)]
    stamp = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    made = cache() / "nspawn"
    mark = made.with_suffix(".stamp")
    with alone_in(made):
        if not (mark.exists() and mark.read_text() == stamp):
            mark.unlink(missing_ok=True)
            shutil.rmtree(made, ignore_errors=True)
            _make(made)
            mark.write_text(stamp)
    return made


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    without = [f"--dpkgopt=path-exclude={each}" for each in LEFT_OUT]
    packages = f"--include={','.join(PACKAGES)}"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, *without, SUITE, folder], check=True)
    subprocess.run(["chroot", folder, "python3", "-m", "venv", ENVIRONMENT], check=True)
    (library,) = (folder / ENVIRONMENT.relative_to("/") / "lib").iterdir()
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--only-binary", ":all:"]
    where = ["--target", str(library / "site-packages"), "--python-version", library.name.removeprefix("python")]
    subprocess.run([*command, *where, "-r", "pyproject.toml", "-c", "requirements.lock"], check=True, cwd=PROJECT)


class Machine:
    """The booted container. Commands run in it as its root."""

    def __init__(self, leader: int) -> None:
        self._leader = leader

    def run(self, *command: str | Path, check: bool = True) -> str:
        """What `command` printed, on both channels. An exit status other than 0 fails the test with that, unless `check` is off."""
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root"}
        inside = ["nsenter", "--target", str(self._leader), "--all", "--wd", "--", *map(str, command)]
        done = subprocess.run(inside, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        assert done.returncode == 0 or not check, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def write(self, path: Path, text: str) -> None:
        """Puts a file in place."""
        self.run("/bin/sh", "-c", 'mkdir -p "${0%/*}" && printf %s "$1" > "$0"', path, text)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def daemons(self) -> list[str]:
        """The units of MPS daemons that run."""
        words = ("systemctl", "list-units", "--plain", "--no-legend", "--state=running", "gpumgr-mps-*")
        return [line.split()[0] for line in self.run(*words).splitlines()]

    def journal(self, output: str, *matches: str) -> str:
        """All entries of the journal, oldest first: it is asked to take up first what has been sent."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--quiet", f"--output={output}", *matches)


@contextmanager
def booted(binds: Mapping[Path, Path]) -> Iterator[Machine]:
    """A machine with folders of this host in it (host's path -> path inside); new ones in STATE. Waits until no other run has a machine."""
    with alone_in(STATE):
        record = STATE / "pids"
        end_recorded(record)
        shutil.rmtree(STATE)
        for each in (STATE, *(source for source in binds if source.is_relative_to(STATE))):
            each.mkdir()
        with _booted(binds, record) as machine:
            yield machine


@contextmanager
def _booted(binds: Mapping[Path, Path], record: Path) -> Iterator[Machine]:
    processes = Processes(STATE, record)
    shown = [f"--bind={source}:{target}" for source, target in binds.items()]
    command = ["systemd-nspawn", "--quiet", f"--machine={NAME}", f"--directory={root()}", "--boot", "--volatile=overlay"]
    command += ["--private-network", "--register=no", "--notify-ready=yes", "--console=pipe", *shown]
    with _cgroup() as inside:
        try:
            # Closed after the boot: nspawn forwards all notifications of the machine's systemd, and both of them block when nothing reads
            # them and the queue is full.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
                address = STATE / "notify"
                address.unlink(missing_ok=True)
                told.bind(str(address))
                told.settimeout(_BOOT_SECONDS)
                # A machine continues when its nspawn is killed. nspawn treats SIGTERM as a request to power off.
                outer = ["setpriv", "--pdeathsig", "TERM", "--", *inside]
                processes.start("nspawn", [*outer, *command], {"NOTIFY_SOCKET": str(address)})
                leader = _leader(told)
            with record.open("a") as file:
                file.write(f"{leader} {start_time(leader)}\n")
            yield Machine(leader)
        finally:
            processes.stop("nspawn", _STOP_SECONDS)
            end_recorded(record)


def _leader(told: socket.socket) -> int:
    """The process id of the machine's systemd, after its boot. nspawn sends it as services do (sd_notify)."""
    leader = 0
    while True:
        lines = told.recv(4096).decode().splitlines()
        leader = next((int(line.partition("=")[2]) for line in lines if line.startswith("X_NSPAWN_LEADER_PID=")), leader)
        if "READY=1" in lines:
            return leader


@contextmanager
def _cgroup() -> Iterator[list[str]]:
    """How a command is called so that it and its groups have a place of their own. Where systemd runs this host, it sees to that."""
    if Path("/run/systemd/system").is_dir():
        yield []
        return
    hierarchies = [each for each in (CGROUPS, CGROUPS / "unified", CGROUPS / "systemd") if (each / "cgroup.procs").exists()]
    groups = [each / NAME for each in hierarchies]
    for group in groups:
        group.mkdir(exist_ok=True)
    enter = "".join(f"echo $$ > {group}/cgroup.procs && " for group in groups)
    try:
        yield ["/bin/sh", "-c", f'{enter}exec "$0" "$@" --keep-unit']
    finally:
        # A process that was killed stays in its group until it is gone.
        wait_until("the machine's groups empty", lambda: not any(_is_left(group) for group in groups))


def _is_left(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
    return group.exists()


class Kubelet:
    """The simulated kubelet, in a loop and a thread of its own: the tests block while they use the machine."""

    def __init__(self, folder: Path) -> None:
        # Without the API server the agent does not know how many cores follow a request for memory; it takes the emptiest GPU then.
        self.sim = SimKubelet(folder, resource_order="core_first")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self.sim.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self.sim.kill())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, name: str, cores: int = 30, memory_blocks: int = 16) -> None:
        """Admits demo/`name` and starts its container. The agent is READY when Register has returned; the kubelet has its devices with the
        first message of ListAndWatch, which comes later."""
        for resource in VCUDA_NAMES:
            self._do(self.sim.until_allocatable(resource))
        container = SimContainer(name="main", cores=cores, memory_blocks=memory_blocks)
        status = self._do(self.sim.run(SimPod(namespace="demo", name=name, uid=f"uid-{name}", containers=(container,))))
        assert status.phase == "Running", status

    def delete(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self.sim.delete, f"uid-{name}")

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)


if __name__ == "__main__":
    print(root())
