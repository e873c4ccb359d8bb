"""What the limiter adds to a launch, on the fake GPU: `python -m tests.bench.bench_launches [--rounds N]` prints one JSON object.

Three processes take turns in one run: one with the bare driver, one with the library and no limit, and one with a limit, within a turn.
A fourth waits for its turn nearly all the time.

Other programs of the machine take the CPU during more than one launch in a hundred, so a p99 of whole launches says little about the
library. So the time outside of the driver's own launch function is measured, too, for each launch.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.bench import figures
from tests.component.enforcement.limiter.harness import Container, Node, Tenant, compile_all

_BATCHES: Final = 10  # per round; each process in turn
_BURSTS: Final = 10
_WAIT_SECONDS: Final = 5
_BARE: Final = "bare"

#: p50 and p99 in ns of each batch: of the whole launch, and of its part outside of the driver's function.
_Batches = list[tuple[int, int, int, int]]


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds of a launch, medians over the batches of all rounds; the CPU percent of a process that waits."""
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        programs = Path(folder) / "programs"
        programs.mkdir()
        compile_all(programs)
        return {
            "launch": _launches(programs, Path(folder) / "launch", rounds),
            "waiting_cpu_percent": _waiting(programs, Path(folder) / "wait"),
        }


def _launches(programs: Path, folder: Path, rounds: int) -> dict[str, Any]:
    containers = {
        _BARE: None,
        "unlimited": Container(folder / "unlimited", share_percent=100),
        "limited": Container(folder / "limited", share_percent=50),
    }
    nodes = {name: _node(programs, folder / f"{name}-gpu") for name in containers}
    for name, container in containers.items():
        if container is not None:
            nodes[name].arbitrate([container])
    tenants = {name: _started(nodes[name], container) for name, container in containers.items()}
    batches: dict[str, _Batches] = {name: [] for name in tenants}
    for _ in range(rounds * _BATCHES + 1):
        for name, tenant in tenants.items():
            batches[name].append((*tenant.ask(f"latency {_BURSTS}")[1:], *tenant.ask("own")[1:]))
    for node in nodes.values():
        node.close()
    bare = batches.pop(_BARE)[1:]
    found = {name: _beyond(bare, each[1:]) for name, each in batches.items()}
    return {_BARE: {"p50_us": _median_us([each[0] for each in bare]), "p99_us": _median_us([each[1] for each in bare])}, **found}


def _beyond(bare: _Batches, others: _Batches) -> dict[str, float]:
    """What is beyond the bare driver's batch that ran next to it. `added`: outside of the driver's function."""
    beyond = [[each - own for each, own in zip(other, base, strict=True)] for base, other in zip(bare, others, strict=True)]
    names = ("beyond_p50_us", "beyond_p99_us", "added_p50_us", "added_p99_us")
    return {name: _median_us(column) for name, column in zip(names, zip(*beyond, strict=True), strict=True)}


def _median_us(nanoseconds: Sequence[int]) -> float:
    return round(median(nanoseconds) / 1000, 3)


def _waiting(programs: Path, folder: Path) -> float:
    containers = [Container(folder / str(share), share_percent=share) for share in (1, 99)]
    node = _node(programs, folder / "gpu")
    node.arbitrate(containers)
    waiting, working = (_started(node, container) for container in containers)
    for tenant in (working, waiting):
        tenant.send(f"work products {1000 * _WAIT_SECONDS} 2")
    time.sleep(1)
    before, began = waiting.cpu_seconds(), time.monotonic()
    time.sleep(_WAIT_SECONDS - 2)
    percent = 100 * (waiting.cpu_seconds() - before) / (time.monotonic() - began)
    node.close()
    return round(percent, 2)


def _node(programs: Path, folder: Path) -> Node:
    folder.mkdir(parents=True)
    return Node(programs, folder)


def _started(node: Node, container: Container | None) -> Tenant:
    tenant = node.start(container)
    assert tenant.ask("init 0")[0] == 0
    return tenant


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=5)
