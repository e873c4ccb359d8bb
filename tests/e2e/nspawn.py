"""A Debian that its own systemd boots, in a container of systemd-nspawn: a host to install the agent on, thrown away when it stops.

Its root is made once and kept in the cache (`python -m tests.e2e.nspawn`), with a virtual environment that lacks only gpumgr itself.
"""

import hashlib
import inspect
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from .build import alone_in
from .places import CGROUPS, PROJECT, cache
from .processes import Processes, end_recorded, start_time, wait_until

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
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, _cgroup() as inside:
        address = STATE / "notify"
        address.unlink(missing_ok=True)
        told.bind(str(address))
        told.settimeout(_BOOT_SECONDS)
        command = ["systemd-nspawn", "--quiet", f"--machine={NAME}", f"--directory={root()}", "--boot", "--volatile=overlay"]
        command += ["--private-network", "--register=no", "--notify-ready=yes", "--console=pipe", *shown]
        # A machine continues when its nspawn is killed. nspawn treats SIGTERM as a request to power off.
        processes.start("nspawn", ["setpriv", "--pdeathsig", "TERM", "--", *inside, *command], {"NOTIFY_SOCKET": str(address)})
        try:
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


if __name__ == "__main__":
    print(root())
