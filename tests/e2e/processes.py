"""The processes that the harness starts: each has a log, dies with the harness, and is remembered on disk.

The record (process id and start time) lets the next run end what a killed run left, and nothing else.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from .places import PROJECT

T = TypeVar("T")


class StartError(Exception):
    """A process ended, or was not ready in time; the message carries the end of its log."""


def start_time(pid: int) -> str | None:
    """When process `pid` started (clock ticks after boot): with the id it names one process for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run while the block lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def end_recorded(record: Path) -> None:
    """Kills the processes of an earlier run that are still there."""
    if not record.exists():
        return
    for line in record.read_text().splitlines():
        pid, _, started = line.partition(" ")
        if pid.isdigit() and start_time(int(pid)) == started:
            kill_and_wait([int(pid)])


def kill_and_wait(pids: Sequence[int]) -> None:
    """SIGKILL to each, and back when they are gone (a child of ours counts as gone when it only waits to be read)."""
    started = {pid: start_time(pid) for pid in pids}
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(then is not None and start_time(pid) == then for pid, then in started.items()):
        time.sleep(0.01)


class Processes:
    """Starts and stops processes by name."""

    def __init__(self, logs: Path, record: Path) -> None:
        self.logs = logs
        self._record = record
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> int:
        """Starts `command`, appends its output to `<logs>/<name>.log`, and answers its process id."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else {**os.environ, **env},
                cwd=cwd,
                start_new_session=True,
            )
        self._running[name] = process
        with self._record.open("a") as record:
            record.write(f"{process.pid} {start_time(process.pid)}\n")
        return process.pid

    def log(self, name: str) -> Path:
        """The log of process `name`."""
        return self.logs / f"{name}.log"

    def pid(self, name: str) -> int:
        """Its process id."""
        return self._running[name].pid

    def check(self, name: str) -> None:
        """Raises StartError where `name` has ended."""
        code = self._running[name].poll()
        if code is not None:
            raise StartError(f"{name} ended with {code}:\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """The end of its log."""
        return self.log(name).read_bytes()[-4000:].decode(errors="replace") if self.log(name).exists() else "(no log)"

    def stop(self, name: str, grace: float = 30.0) -> int | None:
        """SIGTERM, after `grace` seconds (as many as Kubernetes gives a pod) SIGKILL; the exit status, None where `name` never ran."""
        process = self._running.pop(name, None)
        if process is None:
            return None
        process.terminate()
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def kill(self, name: str) -> None:
        """SIGKILL, and back when it is gone."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        """SIGKILL to everything that still runs, the youngest first."""
        for name in reversed(list(self._running)):
            self.kill(name)


def gpumgr(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [sys.executable, "-m", "gpumgr", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=PROJECT)


def wait_until(what: str, condition: Callable[[], T | None], timeout: float = 60.0, every: float = 0.05) -> T:
    """Polls `condition()` until it is true and returns what it returned; TimeoutError names `what` after `timeout` seconds.

    The default is for a machine that stalls: an expected event occurs within it, and a longer wait costs nothing. The last
    look begins after the deadline, so that a stall that outlasts it ends in a look and not in an error.
    """
    deadline = time.monotonic() + timeout
    while True:
        looked = time.monotonic()
        if found := condition():
            return found
        if looked > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(every)


def wait_listening(port: int) -> None:
    """Waits until a process accepts connections at this port of 127.0.0.1."""

    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_until(f"port {port}", listens)


def whole_lines(path: Path, since: int = 0) -> list[str]:
    """The lines of a file after that many bytes, but for one that is still being written. None of a file that is not there (any more)."""
    data = b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(since)
        data = file.read()
    return data[: data.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]


def written(paths: Iterable[Path]) -> list[str]:
    """What containers wrote, from their log files as the container runtime lays them out: time, stream, tag, and the container's line."""
    return [line.split(" ", 3)[3] for path in paths for line in whole_lines(path)]


#: Ports that this process has given out: their users may be down for a while.
_GIVEN: set[int] = set()


def free_ports(number: int) -> list[int]:
    """Ports of 127.0.0.1 without a listener at this moment, and that stay free until they are bound: the system itself gives
    none of them to a connection or to a listener without a given port, and none is returned twice."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in (*range(10_000, first), *range(last + 1, 1 << 16)) if port not in _GIVEN]
    random.shuffle(others)
    ports = list(islice(filter(_is_free, others), number))
    assert len(ports) == number, f"too few ports are free outside of {first} to {last}"
    _GIVEN.update(ports)
    return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
