"""RegisterVDevice of the vcuda backend: 8 and 50 processes at once, the server in its own process (vcuda_server.py).

`python -m tests.bench.bench_registrations [--rounds N]` prints one JSON object. Each call is that of a process of its own, in a container
of its own, over a new connection, as every process of a container registers once; all begin at one instant. The processes run before, so
that the call alone is timed, by light_client.py. The same calls to the floor (floor.py) show what the callers cost.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.bench import figures, light_client
from tests.bench.children import child
from tests.bench.figures import Stopwatch, spread
from tests.bench.places import Places
from tests.bench.vcuda_server import socket_of

AT_ONCE = (8, 50)
#: From the order to the instant at which all call.
_AHEAD_SECONDS = 0.02
_forks = multiprocessing.get_context("forkserver")


def live(orders: Connection) -> None:
    """The life of a calling process: takes (socket, instant on the monotonic clock), answers with the seconds of the call."""
    while (order := orders.recv()) is not None:
        path, at = order
        time.sleep(max(0.0, at - time.monotonic()))
        with Stopwatch() as watch:
            light_client.register(path)
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

    def round(self, sockets: Sequence[Path]) -> list[float]:
        """Seconds of one call of each, all begun at once; who calls where is `sockets`' order."""
        pipes, at = self._pipes[: len(sockets)], time.monotonic() + _AHEAD_SECONDS
        for pipe, socket in zip(pipes, sockets, strict=True):
            pipe.send((socket, at))
        return [float(pipe.recv()) for pipe in pipes]

    def measure(self, sockets: Sequence[Path], rounds: int) -> Mapping[str, object]:
        """As many calls for few at once as for many, gathered by the hundred: p99 is the slowest of these."""
        found = {}
        for number in AT_ONCE:
            seconds: list[float] = []
            for _ in range(rounds * max(AT_ONCE) // number):
                seconds += self.round(sockets[:number])
            found[f"at_once_{number}"] = spread([seconds[n : n + 100] for n in range(0, len(seconds), 100)])
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def measure(rounds: int) -> dict[str, object]:
    count = max(AT_ONCE)
    callers = Callers(count)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gb-") as scratch:
        folder = Path(scratch)
        with child("tests.bench.floor", folder / "floor.sock", 1):
            floor = callers.measure([folder / "floor.sock"] * count, rounds)
        places = Places.lay_out(folder / "places")
        for n, pid in enumerate(callers.pids):
            places.put(("bench", f"pod-{n}"), f"uid-{n}", "main", [pid])
        places.publish()
        with places.runtime(), child("tests.bench.vcuda_server", folder, count):
            ours = callers.measure([socket_of(folder, n) for n in range(count)], rounds)
        callers.close()
    return {"gpumgr": ours, "floor": floor}


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=30)
