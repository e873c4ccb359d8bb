"""The scheduler on a cluster of 5,000 nodes, called by a Go client as kube-scheduler calls it, beside a trivial extender (the floor).

`python -m tests.bench.bench_scheduler [--nodes N] [--pods N] [--cpu_pods N]` prints one JSON object: milliseconds that the client measures,
and CPU of the server's process from /proc. cluster_stub.py is the API server. Without Go there is only the reason why it was skipped.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.bench import figures
from tests.bench.big_cluster import PREFIX, SHAPES, name_of, scheduler_command
from tests.bench.children import child
from tests.bench.figures import cpu_seconds, resident_mib, spread
from tests.e2e.build import build_program

#: One that is asked for often, and one that no node has.
COMMON, NOWHERE = SHAPES[0], (1600, 0)
EVENTS_PER_SECOND = 1000
JOINING = 20
#: After many events: the figures that follow are without their CPU.
SETTLE_SECONDS = 2
#: The setting scheduler.candidates.
MOST_CANDIDATES = 1024
START_SECONDS = 120
#: Three times the duration of a watch.
QUIET_SECONDS = 60
SIZES: Final = (10, 100, 1000)


class Client:
    """The Go program that calls one extender."""

    def __init__(self, process: "subprocess.Popen[str]", pid: int) -> None:
        """`pid`: of the server."""
        self._process, self.pid = process, pid
        self._pods = 0

    def begin(self, pods: int, names: int, shape: tuple[int, int] = COMMON, verbs: Sequence[str] = ("filter",)) -> None:
        asked = {"Verbs": verbs, "Pods": pods, "From": self._pods, "Prefix": PREFIX, "First": 0, "Names": names}
        asked |= {"Cores": shape[0], "Blocks": shape[1]}
        self._pods += pods
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def end(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def calls(
        self, pods: int, names: int, shape: tuple[int, int] = COMMON, verbs: Sequence[str] = ("filter",)
    ) -> dict[str, list[float]]:
        """Seconds of each call, by verb."""
        self.begin(pods, names, shape, verbs)
        return {verb: [each / 1e6 for each in taken] for verb, taken in self.end()["Microseconds"].items()}

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def cpu_ms(self, pods: int, names: int, shape: tuple[int, int] = COMMON) -> float:
        """CPU of the server for each filter call."""
        before = self.cpu_seconds()
        self.calls(pods, names, shape)
        return round(1000 * (self.cpu_seconds() - before) / pods, 3)


@contextmanager
def calling(program: Path, url: str, pid: int) -> Iterator[Client]:
    pipe = subprocess.PIPE
    with subprocess.Popen([program, "calls", f"{url}/scheduler"], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Client(process, pid)
        finally:
            assert process.stdin is not None
            process.stdin.close()


@contextmanager
def scheduler(stub: str, program: Path, folder: Path, nodes: int, started: dict[str, object]) -> Iterator[Client]:
    """`gpumgr scheduler`, once it has answered the first filter."""
    command, url = scheduler_command(stub, folder, "scheduler")
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=sys.stderr) as process:
        try:
            while not _ready(url):
                if process.poll() is not None or time.perf_counter() > begun + START_SECONDS:
                    raise RuntimeError(f"the scheduler is not ready; its status is {process.returncode}")
                time.sleep(0.05)
            with calling(program, url, process.pid) as client:
                client.calls(1, nodes)
                started |= {
                    "first_answer_seconds": round(time.perf_counter() - begun, 2),
                    "cpu_seconds": round(client.cpu_seconds(), 2),
                    "resident_mib": resident_mib(process.pid),
                }
                yield client
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def control(stub: str, what: str, body: object = None) -> Any:
    request = urllib.request.Request(f"{stub}/control/{what}", data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def filters(ours: Client, floor: Client, names: int, rounds: int = 5) -> dict[str, object]:
    """Interleaved; all shapes that pods of the cluster have."""
    taken: dict[str, list[list[float]]] = {"gpumgr": [], "floor": []}
    for shape in SHAPES:
        ours.calls(1, names, shape)
    for _ in range(rounds):
        for name, client in (("gpumgr", ours), ("floor", floor)):
            taken[name].append([each for shape in SHAPES for each in client.calls(10, names, shape)["filter"]])
    return {name: spread(each) for name, each in taken.items()}


def whole_pods(ours: Client, stub: str, names: int) -> dict[str, object]:
    """Pods that pass all verbs; the stub's watch shows each as bound. kube-scheduler prioritizes what filter has answered, and if that is
    more than one node: here the most that the settings allow."""
    before, count = ours.cpu_seconds(), 25
    taken: dict[str, list[float]] = {}
    for shape in SHAPES:
        for number, verbs in ((MOST_CANDIDATES, ("prioritize",)), (names, ("filter", "bind"))):
            for verb, seconds in ours.calls(count, min(number, names), shape, verbs).items():
                taken.setdefault(verb, []).extend(seconds)
    cpu = 1000 * (ours.cpu_seconds() - before) / (count * len(SHAPES))
    control(stub, "end")
    time.sleep(SETTLE_SECONDS)
    return {**{verb: spread([each]) for verb, each in taken.items()}, "cpu_ms_for_each_pod": round(cpu, 2)}


def rejections(ours: Client, floor: Client, nodes: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for names in sorted({min(1000, nodes), nodes}):
        ours.calls(1, names, NOWHERE)
        found[str(names)] = {"gpumgr_cpu_ms": ours.cpu_ms(300, names, NOWHERE), "floor_cpu_ms": floor.cpu_ms(300, names)}
    return found


def joins(ours: Client, stub: str, nodes: int) -> dict[str, object]:
    quiet = ours.calls(200, nodes)["filter"]
    ours.begin(200, nodes)
    control(stub, "nodes", [name_of(nodes + number) for number in range(JOINING)])
    during = [each / 1e6 for each in ours.end()["Microseconds"]["filter"]]
    return {
        "quiet": spread([quiet]),
        "during": spread([during]),
        "longest_ms": [round(1000 * max(each), 1) for each in (quiet, during)],
    }


def events(ours: Client, stub: str, seconds: float = 10) -> dict[str, object]:
    before = ours.cpu_seconds()
    taken = control(stub, "events", {"seconds": seconds, "rate": EVENTS_PER_SECOND})
    return {
        "per_second": round(seconds * EVENTS_PER_SECOND / taken),
        "core_percent": round(100 * (ours.cpu_seconds() - before) / taken, 1),
    }


def quiet(ours: Client) -> dict[str, object]:
    """Nothing happens. The CPU of everything that runs then; mostly the watches, which are resumed every 20 s."""
    time.sleep(SETTLE_SECONDS)
    before, begun = ours.cpu_seconds(), time.perf_counter()
    time.sleep(QUIET_SECONDS)
    used = ours.cpu_seconds() - before
    return {"core_percent": round(100 * used / (time.perf_counter() - begun), 2)}


def sizes(program: Path, folder: Path, floor: Client, largest: int) -> dict[str, object]:
    """CPU and time of a filter call on clusters of other sizes, with four containers and 20 CPU-only pods a node."""
    found: dict[str, object] = {}
    for nodes in [size for size in SIZES if size < largest]:
        with (
            child("tests.bench.cluster_stub", nodes, 4 * nodes, 0) as line,
            scheduler(line.split()[0], program, folder, nodes, {}) as ours,
        ):
            taken = filters(ours, floor, nodes, 2)
            found[str(nodes)] = {**taken, "cpu_ms": ours.cpu_ms(200, nodes), "floor_cpu_ms": floor.cpu_ms(200, nodes)}
    return found


def measure(nodes: int, pods: int, cpu_pods: int) -> dict[str, object]:
    try:
        program = build_program("extender")
    except (OSError, subprocess.CalledProcessError) as error:
        return {"skipped": f"the Go client can't be built: {error}"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        floor_url, floor_pid = stack.enter_context(child("tests.bench.extender_floor")).split()
        floor = stack.enter_context(calling(program, floor_url, int(floor_pid)))
        stub = stack.enter_context(child("tests.bench.cluster_stub", nodes, pods, cpu_pods)).split()[0]
        started: dict[str, object] = {}
        with scheduler(stub, program, folder, nodes, started) as ours:
            still = quiet(ours)
            found = {
                "cluster": {"nodes": nodes, "pods": pods, "cpu_pods": cpu_pods},
                "start": started,
                "quiet": still,
                "filter": filters(ours, floor, nodes),
                "pods": whole_pods(ours, stub, nodes),
                "rejections": rejections(ours, floor, nodes),
                "joins": joins(ours, stub, nodes),
                "events": events(ours, stub),
                "resident_mib": resident_mib(ours.pid),
            }
        return {**found, "sizes": sizes(program, folder, floor, nodes)}


if __name__ == "__main__":
    figures.main(measure, __doc__, nodes=5000, pods=20_000, cpu_pods=100_000)
