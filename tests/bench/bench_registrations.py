"""RegisterVDevice of the vcuda backend: 8 and 50 processes at once, the server in its own process (vcuda_server.py).

`python -m tests.bench.bench_registrations [--rounds N]` prints one JSON object. Each call is that of a process of its own, over a new
connection, as every process of a container registers once; all begin at one instant. They are in one container, or each in one of its
own; `new_container` is the first call of a container that the agent has not seen yet. The processes run before, so that the call alone
is timed: by light_client.py, and also by grpcio, which itself takes most of the time then. `static_client` is the project's own client,
the start of its program included. The same calls to the floor (floor.py) show what the callers cost.
"""

import multiprocessing
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

import tests.kubelet_api  # noqa: F401 (puts proto/ on the import path)
from gpumgr.compat.gpu_manager.vcuda.files import build_client
from tests.bench import figures, light_client
from tests.bench.children import child
from tests.bench.figures import Rounds, Stopwatch, spread
from tests.bench.kubelet import dial
from tests.bench.places import Places
from tests.bench.vcuda_server import socket_of

api, api_services = grpc.protos_and_services("vcuda/api.proto")
AT_ONCE = (8, 50)
#: From the order to the instant at which all call.
_AHEAD_SECONDS = 0.02
_forks = multiprocessing.get_context("forkserver")


def by_grpcio(path: Path) -> None:
    request = api.VDeviceRequest(bus_id="", pod_uid="uid", container_name="main")
    with dial(path) as channel:
        api_services.VCUDAServiceStub(channel).RegisterVDevice(request, timeout=10)


CLIENTS = {"light": light_client.register, "grpcio": by_grpcio}


def live(orders: Connection) -> None:
    """The life of a calling process: takes (client, socket, instant on the monotonic clock), answers with the seconds of the call."""
    while (order := orders.recv()) is not None:
        client, path, at = order
        time.sleep(max(0.0, at - time.monotonic()))
        with Stopwatch() as watch:
            CLIENTS[client](path)
        orders.send(watch.seconds)


class Callers:
    """So many processes that wait to call."""

    def __init__(self, count: int) -> None:
        _forks.set_forkserver_preload([__name__])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = _forks.Pipe()
            process = _forks.Process(target=live, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def round(self, client: str, sockets: Sequence[Path]) -> list[float]:
        """Seconds of one call of each, all begun at once; who calls where is `sockets`' order."""
        pipes, at = self._pipes[: len(sockets)], time.monotonic() + _AHEAD_SECONDS
        for pipe, socket in zip(pipes, sockets, strict=True):
            pipe.send((client, socket, at))
        return [float(pipe.recv()) for pipe in pipes]

    def one(self, client: str, n: int, socket: Path) -> float:
        """Seconds of one call of caller `n`."""
        self._pipes[n].send((client, socket, time.monotonic()))
        return float(self._pipes[n].recv())

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


class Servers:
    """A node in `folder` on which the callers are in `containers` containers, and the server of their sockets."""

    def __init__(self, folder: Path, pids: Sequence[int], containers: int, *, running: bool = True) -> None:
        self.folder, self._pids, self._count = folder, pids, containers
        self._places = Places.lay_out(folder / "places")
        self._cgroups = [self.begin(n) for n in range(containers if running else 0)]

    def begin(self, n: int) -> str:
        """The container runs from now on; its cgroup."""
        container = self._places.put(("bench", f"pod-{n}"), f"uid-{n}", "main", self._pids[n :: self._count])
        self._places.publish()
        return str(container.cgroup)

    @contextmanager
    def serving(self) -> Iterator[None]:
        with self._places.runtime(), child("tests.bench.vcuda_server", self.folder, self._count):
            yield

    def sockets(self, callers: int) -> list[Path]:
        return [socket_of(self.folder, n % self._count) for n in range(callers)]

    def client_round(self, client: Path, callers: int) -> list[float]:
        """Seconds from the start of the static client to its end. Its process is there before and runs it in its own place."""
        waiting = [self._waiting(client, socket) for socket in self.sockets(callers)]
        for n, cgroup in enumerate(self._cgroups):
            self._places.run(cgroup, [process.pid for process in waiting[n :: self._count]])
        return ended(waiting)

    @staticmethod
    def _waiting(client: Path, socket: Path) -> subprocess.Popen[bytes]:
        line = f'read go; exec {client} --addr {socket} --bus-id "" --pod-uid uid --cont-name main'
        return subprocess.Popen(["/bin/sh", "-c", line], stdin=subprocess.PIPE)


def ended(waiting: Sequence[subprocess.Popen[bytes]]) -> list[float]:
    """Lets all of them go, and takes the time of each until it has ended. Raises RuntimeError if one could not register."""
    poll = select.poll()
    descriptors = [os.pidfd_open(process.pid) for process in waiting]
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    began: list[float] = []
    took: dict[int, float] = {}
    for process in waiting:
        assert process.stdin is not None
        began.append(time.perf_counter())
        process.stdin.write(b"\n")
        process.stdin.close()
    while len(took) < len(waiting):
        ready, now = [descriptor for descriptor, _ in poll.poll()], time.perf_counter()
        for descriptor in ready:
            took[descriptor] = now
            poll.unregister(descriptor)
    for process, descriptor in zip(waiting, descriptors, strict=True):
        os.close(descriptor)
        if (status := process.wait()) != 0:
            raise RuntimeError(f"gpu-client ended with status {status}")
    return [took[descriptor] - start for descriptor, start in zip(descriptors, began, strict=True)]


def measure(rounds: int) -> dict[str, object]:
    callers = Callers(max(AT_ONCE))
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gb-") as scratch:
        folder = Path(scratch)
        program, floor = build_client(folder / "client"), folder / "floor.sock"

        with child("tests.bench.floor", floor, 1):
            result["floor"] = {client: _calls(callers, client, [floor] * max(AT_ONCE), rounds) for client in CLIENTS}
        for name, containers in (("one_container", 1), ("own_containers", max(AT_ONCE))):
            node = Servers(folder / name, callers.pids, containers)
            with node.serving():
                calls = {client: _calls(callers, client, node.sockets(max(AT_ONCE)), rounds) for client in CLIENTS}
                result[name] = {**calls, "static_client": _programs(node, program, rounds // 4)}
        node = Servers(folder / "new", callers.pids, max(AT_ONCE), running=False)
        with node.serving():
            result["new_container"] = spread(_first_calls(callers, node, rounds))
        callers.close()
    return result


def _first_calls(callers: Callers, node: Servers, rounds: int) -> Rounds:
    """The first call of each of many new containers, one right after the other: the runtime was just asked, which is the longest wait."""
    seconds: list[float] = []
    for n, socket in enumerate(node.sockets(min(rounds, max(AT_ONCE)))):
        node.begin(n)
        seconds.append(callers.one("light", n, socket))
    return [seconds]


def _calls(callers: Callers, client: str, sockets: Sequence[Path], rounds: int) -> Mapping[str, object]:
    return {f"at_once_{n}": spread(_rounds(partial(callers.round, client, sockets[:n]), n, rounds)) for n in AT_ONCE}


def _programs(node: Servers, program: Path, rounds: int) -> Mapping[str, object]:
    return {f"at_once_{n}": spread(_rounds(partial(node.client_round, program, n), n, rounds)) for n in AT_ONCE}


def _rounds(call: Callable[[], list[float]], at_once: int, rounds: int) -> Rounds:
    """As many calls for few at once as for many, gathered by the hundred: p99 is the slowest of these."""
    seconds: list[float] = []
    for _ in range(rounds * max(AT_ONCE) // at_once):
        seconds += call()
    return [seconds[n : n + 100] for n in range(0, len(seconds), 100)]


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=30)
