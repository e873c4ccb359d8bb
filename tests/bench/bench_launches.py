"""What the limiter adds to a launch, on the fake GPU: `python -m tests.bench.bench_launches [--rounds N]` prints one JSON object.

Three processes take turns in one run: with the bare driver, with the library and no limit, and with a limit, within a turn. A fourth
waits for its turn nearly all the time.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.bench import figures
from tests.component.enforcement.limiter.harness import Container, Node, Tenant, compile_all

_BURSTS: Final = 100
_WAIT_SECONDS: Final = 5
_NAMES: Final = ("p50_us", "p99_us")


def measure(rounds: int) -> dict[str, Any]:
    """p50 and p99 of a launch in microseconds, and what is beyond the bare driver's, medians of `rounds`; the CPU percent of a process that
    waits."""
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        programs = Path(folder) / "programs"
        programs.mkdir()
        compile_all(programs)
        return {
            "launch": _launches(programs, Path(folder) / "launch", rounds),
            "waiting_cpu_percent": _waiting(programs, Path(folder) / "wait"),
        }


def _launches(programs: Path, folder: Path, rounds: int) -> dict[str, Any]:
    unlimited, limited = (Container(folder / name, share_percent=share) for name, share in (("unlimited", 100), ("limited", 50)))
    nodes = [_node(programs, folder / name) for name in ("bare-gpu", "unlimited-gpu", "limited-gpu")]
    nodes[1].arbitrate([unlimited])
    nodes[2].arbitrate([limited])
    tenants = [_started(node, container) for node, container in zip(nodes, (None, unlimited, limited), strict=True)]
    took: list[list[tuple[int, int]]] = [[], [], []]
    for _ in range(rounds + 1):
        for tenant, samples in zip(tenants, took, strict=True):
            samples.append(tenant.ask(f"latency {_BURSTS}")[1:])
    for node in nodes:
        node.close()
    bare, *others = (
        {name: median(each) / 1000 for name, each in zip(_NAMES, zip(*samples[1:], strict=True), strict=True)} for samples in took
    )
    beyond = [{f"beyond_{name}": found[name] - bare[name] for name in _NAMES} for found in others]
    return dict(zip(("bare", "unlimited", "limited"), (bare, *beyond), strict=True))


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
