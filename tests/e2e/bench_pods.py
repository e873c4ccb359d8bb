"""Pods at once on a real kubelet: the agent beside a plugin that answers everything at once with nothing.

`python -m tests.e2e.bench_pods --output FILE` (root). Rounds are interleaved: each takes one measure of each plugin, in
alternating order, on the same kubelet; what counts is the ratio of the medians.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .agent import Agent
from .api import phase
from .cluster import Cluster
from .manifests import CORE, MEMORY, gpu_pod
from .podresources import PodResources
from .processes import wait_until

FLOOR = {CORE: 800, MEMORY: 2560}
CORES = BLOCKS = 10


@dataclass(frozen=True)
class Measure:
    """One crowd: seconds until all its pods were Running or had failed, and how many failed."""

    seconds: float
    failed: int


def crowd(cluster: Cluster, number: int, bound: bool) -> Measure:
    """Creates `number` pods of one share each and waits for all; then takes them away again."""
    names = [f"pod-{index}" for index in range(number)]
    begun = time.monotonic()
    cluster.create(gpu_pod(name, CORES, BLOCKS, bound=bound) for name in names)
    pods = cluster.pods.wait(
        f"{number} pods at rest",
        lambda now: all(name in now and phase(now[name]) in ("Running", "Failed") for name in names),
        300,
    )
    seconds = time.monotonic() - begun
    failures = [pods[name]["status"].get("message") for name in names if phase(pods[name]) == "Failed"]
    for message in sorted(set(failures))[:3]:
        print(f"failed: {message}", flush=True)
    failed = len(failures)
    cluster.delete_all(300)
    return Measure(round(seconds, 3), failed)


class Bench:
    """The two plugins on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agent = Agent(cluster)
        self._resources = PodResources()

    def close(self) -> None:
        """Lets go of the agent and the kubelet."""
        self.agent.close()
        self._resources.close()

    @contextmanager
    def with_floor(self) -> Iterator[None]:
        """The trivial plugin serves the kubelet."""
        self.cluster.start_floor()
        try:
            wait_until("the floor plugin's ids", lambda: self._resources.allocatable() == FLOOR, 20)
            self.cluster.wait_allocatable(FLOOR[CORE], FLOOR[MEMORY])
            yield
        finally:
            self.cluster.processes.stop("floor")

    @contextmanager
    def with_agent(self) -> Iterator[None]:
        """The agent serves it."""
        self.agent.start()
        try:
            self.cluster.wait_allocatable(self.agent.offer[CORE], self.agent.offer[MEMORY])
            yield
        finally:
            self.agent.stop()


def summary(rounds: dict[str, list[Measure]]) -> dict[str, object]:
    """The figures of one crowd size."""
    medians = {name: statistics.median(each.seconds for each in measures) for name, measures in rounds.items()}
    pairs = zip(rounds["gpumgr"], rounds["floor"], strict=True)
    return {
        "median_seconds": medians,
        "ratio": round(medians["gpumgr"] / medians["floor"], 3),
        "ratio_of_each_round": [round(ours.seconds / floor.seconds, 3) for ours, floor in pairs],
        "failed": {name: sum(each.failed for each in measures) for name, measures in rounds.items()},
        "rounds": {name: [asdict(each) for each in measures] for name, measures in rounds.items()},
    }


def run(sizes: list[int], rounds: int, ways: list[str]) -> dict[str, object]:
    """All measures; a summary for each size and way."""
    cluster = Cluster()
    cluster.start()
    try:
        bench = Bench(cluster)
        taken: dict[str, dict[str, list[Measure]]] = {
            f"{size} {way}": {"floor": [], "gpumgr": []} for way in ways for size in sizes
        }
        plugins = {"floor": bench.with_floor, "gpumgr": bench.with_agent}
        for number in range(rounds):
            for name in sorted(plugins, reverse=number % 2 == 1):
                with plugins[name]():
                    for key, into in taken.items():
                        size, way = key.split()
                        into[name].append(crowd(cluster, int(size), way == "bound"))
                        print(f"round {number + 1}: {key}, {name}: {into[name][-1]}", flush=True)
        bench.close()
        return {key: summary(measures) for key, measures in taken.items()}
    except BaseException:
        if logs := os.environ.get("GPUMGR_E2E_LOGS"):
            cluster.keep_logs(Path(logs))
        raise
    finally:
        cluster.stop()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 80])
    parser.add_argument("--ways", nargs="+", choices=["bound", "scheduled"], default=["bound"])
    arguments = parser.parse_args()
    figures = run(arguments.sizes, arguments.rounds, arguments.ways)
    arguments.output.write_text(json.dumps({"pods_at_once": figures}, indent=2) + "\n")
    for key, figure in figures.items():
        assert isinstance(figure, dict)
        print(f"{key}: {figure['median_seconds']}, ratio {figure['ratio']}, failed {figure['failed']}")


if __name__ == "__main__":
    main()
