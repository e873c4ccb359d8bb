"""What needs real parts of Kubernetes: pods at once, the start of the DRA driver, and the extender below a real kube-scheduler.

`python -m tests.e2e.bench_cluster --output FILE` (root). Rounds are interleaved: each takes one measure of each way, in alternating order,
on the same cluster; what counts is the ratio of the medians.
"""

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpumgr.common.units import DRA_DRIVER
from gpumgr.kube.cluster_annotations import INVENTORY_ANNOTATION
from tests.bench.figures import cpu_seconds

from .agent import Agent
from .api import phase
from .cluster import Cluster
from .dra import CLAIMS, DraNode, claiming, in_mode_dra, request, template
from .manifests import CORE, MEMORY, Json, container, gpu_pod, pod
from .processes import free_ports, wait_until
from .scheduling import SCHEDULER, api_node, filter_status, inventory, scheduled_pod, start_kube_scheduler, start_replica
from .tenants import control

GPUS: Final = 8
PLAIN, OURS = "plain", SCHEDULER
REPLICAS: Final = ("extender-a", "extender-b")
LEASE: Final = "/apis/coordination.k8s.io/v1/namespaces/default/leases/gpumgr-scheduler"
SHARE: Final = template("share", request("gpu", 10, "2560Mi"))
Figures = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """In seconds."""
    return {"p50": round(statistics.median(values), 3), "worst": round(max(values), 3)}


# -- pods at once ------------------------------------------------------------------------------------------------------------


class Crowd(NamedTuple):
    """Seconds until all pods were bound, and Running."""

    bound: float
    seconds: float


class Pods:
    """Ways to run pods on the node with a kubelet. Each is a context in which a function makes a pod of a name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.agent = cluster, Agent(cluster)
        self.ways = {"claims": self.claims, "nothing": self.nothing, "plugin": self.plugin}

    @contextmanager
    def plugin(self) -> Iterator[Callable[[str], Json]]:
        """The agent as device plugin."""
        self.agent.start()
        try:
            self.cluster.wait_allocatable(self.agent.offer[CORE], self.agent.offer[MEMORY])
            yield lambda name: gpu_pod(name, 10, 10, bound=False)
        finally:
            self.agent.stop()

    @contextmanager
    def nothing(self) -> Iterator[Callable[[str], Json]]:
        """Pods without GPUs."""
        yield lambda name: pod(name, [container()], bound=False)

    @contextmanager
    def claims(self) -> Iterator[Callable[[str], Json]]:
        """The agent in mode dra."""
        with self.driver():
            yield lambda name: claiming(name, "share")

    @contextmanager
    def driver(self) -> Iterator[DraNode]:
        with in_mode_dra(self.cluster, self.agent, {"enforcement": {"backend": "none"}}) as found:
            found.make(SHARE)
            yield found

    def crowd(self, make: Callable[[str], Json], number: int) -> Crowd:
        """Creates so many pods and takes them away again when all are Running."""
        names = [f"pod-{index}" for index in range(number)]
        began, bound = time.monotonic(), list[float]()

        def at_rest(now: Mapping[str, Json]) -> bool:
            if not bound and all("nodeName" in now.get(name, {}).get("spec", {}) for name in names):
                bound.append(round(time.monotonic() - began, 2))
            return all(name in now and phase(now[name]) == "Running" for name in names)

        self.cluster.create(map(make, names))
        self.cluster.pods.wait("all Running", at_rest, 300)
        seconds = round(time.monotonic() - began, 2)
        self.cluster.delete_all(300)
        wait_until("no claims", lambda: not self.cluster.api.request("GET", CLAIMS)["items"], 120, every=0.2)
        return Crowd(bound[0], seconds)

    def at_once(self, rounds: int, sizes: Sequence[int]) -> Figures:
        """Size -> way -> medians. A first pod goes before each crowd: kube-scheduler and the controllers have begun."""
        taken: dict[int, dict[str, list[Crowd]]] = {size: {way: [] for way in self.ways} for size in sizes}
        for turn in range(rounds):
            for way in self.ways if turn % 2 == 0 else reversed(self.ways):
                with self.ways[way]() as make:
                    for size in (1, *sizes):
                        found = self.crowd(make, size)
                        print(f"round {turn + 1}: {size} pods, {way}: {found}", flush=True)
                        if size in taken:
                            taken[size][way].append(found)
        return {str(size): {way: _medians(each) for way, each in ways.items()} for size, ways in taken.items()}

    # -- how soon the DRA driver is there

    def soon(self, repeats: int) -> Figures:
        """Seconds from a start to the registration, from a kubelet's wipe until the slice is there again, from a fault to the taint."""
        found: dict[str, list[float]] = {"started": [], "started_after_kill": [], "slice_back": [], "taint": []}
        moments = random.Random(0)
        with self.driver() as there:
            for repeat in range(repeats):
                for name, end in (("started", self.agent.stop), ("started_after_kill", self.agent.kill)):
                    time.sleep(moments.random())  # the end comes at any time after the kubelet's last look
                    end()
                    began = time.time()
                    self.agent.start(wait=False)
                    found[name].append(self._registered(began) - began)
                    wait_until("the slice", lambda: bool(there.slices()))
                self.cluster.processes.stop("kubelet")
                found["slice_back"].append(self._slice_gap(there))
                time.sleep(2.5)  # at most one write each 2 s
                found["taint"].append(self._taint(there, repeat % 8))
        return {name: spread(each) for name, each in found.items()}

    def _taint(self, there: DraNode, gpu: int) -> float:
        began, tainted = time.monotonic(), _tainted(there)
        control().xid(gpu, 79)
        wait_until("the taint", lambda: _tainted(there) - tainted, every=0.01)
        taken = time.monotonic() - began
        control().clear()
        return taken

    def _slice_gap(self, there: DraNode) -> float:
        """How long a starting kubelet's wipe leaves the node without a slice, at most: from the last look that shows the former one to the
        first look that shows the next one. There may be no look between the two."""
        (former,), last = (each["metadata"]["uid"] for each in there.slices()), [time.monotonic()]

        def back() -> bool:
            now, found = time.monotonic(), {each["metadata"]["uid"] for each in there.slices()}
            if former in found:
                last[0] = now
            return bool(found - {former})

        def watched() -> float:
            wait_until("the slice", back, every=0.005)
            return time.monotonic() - last[0]

        # The kubelet ends with the thread that starts it.
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(watched)
            self.cluster.start_kubelet()
            seconds = waiting.result()
        self.cluster.wait_ready()
        return seconds

    def _registered(self, since: float) -> float:
        """The time of the registration, by the agent's log; Unix times."""

        def times() -> list[float]:
            lines = [each for each in self.agent.log() if each["event"] == "registered" and each.get("driver") == DRA_DRIVER]
            found = [datetime.fromisoformat(each["timestamp"].replace("Z", "+00:00")).timestamp() for each in lines]
            return [each for each in found if each > since]

        return wait_until("the registration", times)[0]


def _medians(crowds: Sequence[Crowd]) -> Figures:
    return {
        "bound_seconds": statistics.median(each.bound for each in crowds),
        "running_seconds": statistics.median(each.seconds for each in crowds),
        "rounds": [each._asdict() for each in crowds],
    }


def _tainted(node: DraNode) -> set[str]:
    return {device["name"] for each in node.slices() for device in each["spec"]["devices"] if "taints" in device}


# -- the extender below a real kube-scheduler --------------------------------------------------------------------------------


def node_name(number: int) -> str:
    return f"gpu-node-{number:04d}"


def described(name: str, model: str = "NVIDIA A100-SXM4-80GB") -> str:
    return inventory(name, GPUS, model, lambda _one, _other: True, 4)


def scheduled(name: str, scheduler: str, model: str = "", cores: int = 50, memory: int = 32) -> Json:
    asks = {"gpumgr.io/use-gpu-model": model} if model else {}
    return scheduled_pod(name, (cores, memory), annotations=asks, schedulerName=scheduler)


class Backlog(NamedTuple):
    """CPU milliseconds are those for each pod."""

    pods_a_second: float
    extender_cpu_ms: float
    kube_scheduler_cpu_ms: float


class Schedulers:
    """Both kube-schedulers, with and without an extender, on a cluster of API-only nodes. Both have the shipped configuration. Pods are
    created while kube-scheduler is stopped by SIGSTOP, so that their creation is not measured."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.ports = dict(zip(REPLICAS, free_ports(2), strict=True))

    @contextmanager
    def kube_scheduler(self, name: str, extender: str | None = None) -> Iterator[None]:
        """`extender` is the replica that it calls. Begins when a first pod is bound and gone: caches are filled."""
        called = extender and {"urlPrefix": f"http://127.0.0.1:{self.ports[extender]}/scheduler"}
        start_kube_scheduler(self.cluster, called or None, process=name, scheduler=name)
        try:
            self.cluster.create([scheduled("first", name)])
            self.wait_bound(["first"])
            self.end(["first"])
            yield
        finally:
            self.cluster.processes.stop(name)

    @contextmanager
    def extender(self, *replicas: str) -> Iterator[None]:
        for name in replicas:
            self.start_extender(name, election=len(replicas) > 1)
        try:
            wait_until("an extender that answers", lambda: any(self.status(name) == 200 for name in replicas))
            yield
        finally:
            for name in replicas:
                self.cluster.processes.stop(name)

    def start_extender(self, name: str, *, election: bool) -> None:
        settings = [f"scheduler.leader_election={str(election).lower()}", "scheduler.lease_namespace=default", "http.port=0"]
        start_replica(self.cluster, name, self.cluster.kubeconfig("admin"), self.ports[name], *settings)

    def status(self, name: str) -> int | None:
        return filter_status(self.ports[name])

    def cpu_seconds(self, name: str) -> float:
        return cpu_seconds(self.cluster.processes.pid(name))

    def wait_bound(self, names: Sequence[str], timeout: float = 300) -> float:
        """The time (monotonic clock) at which the watch has shown all of them on nodes."""
        missing = set(names)

        def bound(pods: Mapping[str, Json]) -> bool:
            missing.difference_update([name for name in missing if "nodeName" in pods.get(name, {}).get("spec", {})])
            return not missing

        self.cluster.pods.wait("pods bound", bound, timeout)
        return time.monotonic()

    def end(self, names: Sequence[str]) -> None:
        self.cluster.delete(names, grace=0)
        self.cluster.wait_gone(names)

    def backlog(self, scheduler: str, number: int) -> Backlog:
        pid = self.cluster.processes.pid(scheduler)
        names = [f"backlog-{each}" for each in range(number)]
        os.kill(pid, signal.SIGSTOP)
        self.cluster.create(scheduled(name, scheduler) for name in names)
        before, began = (self.cpu_seconds(REPLICAS[0]), self.cpu_seconds(scheduler)), time.monotonic()
        os.kill(pid, signal.SIGCONT)
        ended = self.wait_bound(names)
        extender, kube_scheduler = (
            round(1000 * (self.cpu_seconds(each) - then) / number, 2)
            for each, then in zip((REPLICAS[0], scheduler), before, strict=True)
        )
        self.end(names)
        return Backlog(round(number / (ended - began), 1), extender, kube_scheduler)

    @contextmanager
    def rejected(self, number: int) -> Iterator[None]:
        """Pods wait that no node can take, and each has been tried."""
        names = [f"rejected-{each}" for each in range(number)]
        self.cluster.create(scheduled(name, OURS, "H100") for name in names)
        wait_until("rejections", lambda: all(map(self.tried, names)), 300, every=0.2)
        yield
        self.end(names)

    def wakes(self, repeats: int) -> Figures:
        """Seconds from a node's new inventory to the binding of the one pod, of all that wait, which it helps."""
        found = []
        for repeat in range(repeats):
            name, target = f"woken-{repeat}", node_name(repeat)
            self.cluster.create([scheduled(name, OURS, "GB200")])
            wait_until("a rejection", partial(self.tried, name))
            time.sleep(3)  # its backoff ends, and the events that its creation made
            began = time.monotonic()
            self.describe(target, described(target, "NVIDIA GB200"))
            found.append(self.wait_bound([name]) - began)
            self.end([name])
            self.describe(target, described(target))
        return spread(found)

    def tried(self, name: str) -> bool:
        found = self.cluster.pods.all().get(name, {}).get("status", {}).get("conditions") or ()
        return any(each["type"] == "PodScheduled" for each in found)

    def describe(self, name: str, text: str) -> None:
        self.cluster.api.annotate(f"/api/v1/nodes/{name}", {INVENTORY_ANNOTATION: text})

    def stream(self, seconds: float, rate: float, repeats: int) -> Figures:
        """CPU-only pods at this rate; beside them, now and then, a GPU pod that fits."""
        names = []
        before, began = self.cpu_seconds(REPLICAS[0]), time.monotonic()
        with ThreadPoolExecutor(repeats) as threads:
            waits = []
            for number in range(int(seconds * rate)):
                time.sleep(max(0.0, began + number / rate - time.monotonic()))
                names.append(f"cpu-{number}")
                self.cluster.create([scheduled(names[-1], OURS, cores=0, memory=0)])
                if number % int(seconds * rate / repeats) == 0:
                    names.append(f"fits-{number}")
                    self.cluster.create([scheduled(names[-1], OURS)])
                    waits.append((time.monotonic(), threads.submit(self.wait_bound, [names[-1]])))
            percent = 100 * (self.cpu_seconds(REPLICAS[0]) - before) / (time.monotonic() - began)
            bound = spread([bound.result() - created for created, bound in waits])
        self.wait_bound(names)
        self.end(names)
        return {"extender_core_percent": round(percent, 1), "new_pod_bound_seconds": bound}

    def takeover(self, end: Callable[[str], object]) -> float:
        """Seconds until the other replica answers."""
        leader = next(name for name in REPLICAS if self.status(name) == 200)
        (other,) = set(REPLICAS) - {leader}
        wait_until("a second replica", lambda: self.status(other) == 503)
        began = time.monotonic()
        end(leader)
        wait_until("another leader", lambda: self.status(other) == 200, every=0.02)
        taken = time.monotonic() - began
        self.start_extender(leader, election=True)
        return round(taken, 2)

    def measure(self, rounds: int, sizes: Sequence[int]) -> Figures:
        """All figures. The node's kubelet and the cluster's own scheduler are stopped for good."""
        for name in ("kubelet", "kube-scheduler"):
            self.cluster.processes.stop(name)
        for number in range(self.nodes):
            name = node_name(number)
            self.cluster.api.request("POST", "/api/v1/nodes", api_node(name, GPUS, described(name)))
        rates: dict[int, dict[str, list[Backlog]]] = {size: {PLAIN: [], OURS: []} for size in sizes}
        with self.extender(REPLICAS[0]):
            for turn in range(rounds):
                for name in sorted((PLAIN, OURS), reverse=turn % 2 == 1):
                    with self.kube_scheduler(name, REPLICAS[0] if name == OURS else None):
                        for size in sizes:
                            rates[size][name].append(self.backlog(name, size))
            found: Figures = {"nodes": self.nodes, "pods_a_second": {str(size): _rates(each) for size, each in rates.items()}}
            with self.kube_scheduler(OURS, REPLICAS[0]):
                with self.rejected(200):
                    found["woken_among_200_seconds"] = self.wakes(10)
                with self.rejected(500):
                    found["among_500"] = self.stream(30, 10, 10)
        with self.extender(*REPLICAS):
            ways: dict[str, Callable[[str], object]] = {
                "SIGTERM": self.cluster.processes.stop,
                "SIGKILL": self.cluster.processes.kill,
            }
            found["takeover_seconds"] = {name: [self.takeover(end) for _ in range(2)] for name, end in ways.items()}
        self.cluster.api.request("DELETE", LEASE)
        return found


def _rates(found: dict[str, list[Backlog]]) -> Figures:
    ours, plain = (statistics.median(each.pods_a_second for each in found[name]) for name in (OURS, PLAIN))
    rounds = {name: [each._asdict() for each in rounds] for name, rounds in found.items()}
    return {"gpumgr": ours, "plain": plain, "ratio": round(ours / plain, 2), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 80], help="of the crowds of pods")
    parser.add_argument("--nodes", type=int, default=1000, help="of kube-scheduler")
    parser.add_argument("--backlogs", type=int, nargs="+", default=[200, 1000], help="of kube-scheduler")
    parts = ["soon", "pods", "scheduler"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    found: Figures = {}
    cluster = Cluster()
    cluster.start()
    try:
        pods = Pods(cluster)
        measures: dict[str, tuple[str, Callable[[], Figures]]] = {
            "soon": ("driver_soon_seconds", lambda: pods.soon(options.rounds)),
            "pods": ("pods_at_once", lambda: pods.at_once(options.rounds, options.sizes)),
            "scheduler": ("kube_scheduler", lambda: Schedulers(cluster, options.nodes).measure(options.rounds, options.backlogs)),
        }
        for part in options.parts:
            name, measure = measures[part]
            found[name] = measure()
            options.output.write_text(json.dumps(found, indent=2) + "\n")
    except BaseException:
        if logs := os.environ.get("GPUMGR_E2E_LOGS"):
            cluster.keep_logs(Path(logs))
        raise
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
