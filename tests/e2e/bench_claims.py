"""Claims on a real cluster: pods at once beside device plugins, without claims and beside an empty driver; claims on many nodes; how soon
the driver is there.

`python -m tests.e2e.bench_claims --output FILE` (root). Rounds are interleaved: each takes one measure of each way, in alternating
order; what counts is the ratio of the medians. Limits of clients: "default" are those of kube-controller-manager (20 requests a second,
burst 30) and kube-scheduler (50, 100); "raised" are 200, 400 and 500, 1000.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpumgr.kubelet.dra import DRIVER
from gpumgr.kubelet.dra.slices import SLICES, resource_slice

from .agent import Agent
from .api import phase
from .bench_kube_scheduler import node, node_name
from .cluster import Cluster
from .dra import CLAIMS, CLASS, DraNode, claiming, in_mode_dra, request, template
from .manifests import Json, container, gpu_pod, pod
from .places import KUBELET_ROOT, PROJECT, STATE
from .processes import wait_until
from .tenants import control
from .test_dra_slices import devices

SHARE: Final = template("share", request("gpu", 10, "2560Mi"))
CONTROLLER_LIMITS: Final = {"default": (), "raised": ("--kube-api-qps=200", "--kube-api-burst=400")}
SCHEDULER_LIMITS: Final = {"default": {}, "raised": {"qps": 500, "burst": 1000}}
#: Without the agent the kubelet retries what the API server refused only after 70 s and more.
PATIENCE_SECONDS: Final = {"empty": 20.0}
LARGE_NODES, LARGE_PODS = 1000, 200


class Measure(NamedTuple):
    """Seconds until all pods were bound, and Running; None: not within the patience. `running`: how many were at last."""

    bound: float | None
    running_seconds: float | None
    running: int


def crowd(cluster: Cluster, make: Callable[[str], Json], number: int, patience: float) -> Measure:
    names = [f"pod-{index}" for index in range(number)]
    began, bound = time.monotonic(), list[float]()

    def at_rest(now: Any) -> bool:
        if not bound and all("nodeName" in now.get(name, {}).get("spec", {}) for name in names):
            bound.append(time.monotonic() - began)
        return all(name in now and phase(now[name]) == "Running" for name in names)

    cluster.create(map(make, names))
    seconds: float | None = None
    try:
        cluster.pods.wait("all Running", at_rest, patience)
        seconds = round(time.monotonic() - began, 2)
    except TimeoutError:
        pass
    now = cluster.pods.all()
    running = sum(phase(now[name]) == "Running" for name in names)
    cluster.delete_all(300)
    wait_until("no claims", lambda: not cluster.api.request("GET", CLAIMS)["items"], 120, every=0.2)
    return Measure(round(bound[0], 2) if bound else None, seconds, running)


class Bench:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.agent = cluster, Agent(cluster)
        self.slice: Json = {}

    def limit(self, limits: str) -> None:
        """Starts kube-scheduler and kube-controller-manager again with these limits."""
        self.cluster.processes.stop("kube-scheduler")
        file = STATE / "bench-scheduler.yaml"
        connection = {"kubeconfig": str(self.cluster.kubeconfig("admin")), **SCHEDULER_LIMITS[limits]}
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": connection,
            "leaderElection": {"leaderElect": False},
        }
        file.write_text(json.dumps(config))
        binary = self.cluster.binaries / "kubernetes" / "kube-scheduler"
        self.cluster.processes.start("kube-scheduler", [binary, f"--config={file}", "--secure-port=0"])

    @contextmanager
    def plugin(self, limits: str) -> Iterator[Callable[[str], Json]]:
        with self._without_driver(limits):
            self.agent.start()
            self.cluster.wait_allocatable(
                self.agent.offer["tencent.com/vcuda-core"], self.agent.offer["tencent.com/vcuda-memory"]
            )
            yield lambda name: gpu_pod(name, 10, 10, bound=False)
            self.agent.stop()

    @contextmanager
    def nothing(self, limits: str) -> Iterator[Callable[[str], Json]]:
        with self._without_driver(limits):
            yield lambda name: pod(name, [container()], bound=False)

    @contextmanager
    def claims(self, limits: str) -> Iterator[Callable[[str], Json]]:
        with self.driver(limits) as found:
            yield lambda name: claiming(name, "share")
            (self.slice,) = found.slices()

    @contextmanager
    def empty(self, limits: str) -> Iterator[Callable[[str], Json]]:
        """The slice is the agent's own, as it was published last."""
        with self._without_driver(limits), self._objects():
            log = self.cluster.processes.log("empty")
            before = log.read_text().count(" registered ") if log.exists() else 0
            folders = [str(KUBELET_ROOT / "plugins"), str(KUBELET_ROOT / "plugins_registry")]
            self.cluster.processes.start("empty", [sys.executable, "-m", "tests.e2e.empty_driver", *folders], cwd=PROJECT)
            wait_until("the driver's registration", lambda: log.read_text().count(" registered ") > before)
            kept = {key: self.slice["metadata"][key] for key in ("name", "ownerReferences")}
            self.cluster.api.request("POST", SLICES, {**self.slice, "metadata": kept})
            yield lambda name: claiming(name, "share")
            self.cluster.processes.stop("empty")
            self.cluster.api.request("DELETE", SLICES)

    @contextmanager
    def driver(self, limits: str) -> Iterator[DraNode]:
        """The agent in mode dra."""
        self.limit(limits)
        with in_mode_dra(self.cluster, self.agent, {"enforcement": {"backend": "none"}}) as found:
            self._restart_controllers(limits)
            found.make(SHARE)
            yield found

    @contextmanager
    def _without_driver(self, limits: str) -> Iterator[None]:
        self.limit(limits)
        self.cluster.start_controllers()
        self._restart_controllers(limits)
        try:
            yield
        finally:
            self.cluster.stop_controllers()

    def _restart_controllers(self, limits: str) -> None:
        self.cluster.stop_controllers()
        self.cluster.start_controllers(*CONTROLLER_LIMITS[limits])

    @contextmanager
    def _objects(self, shape: Json = SHARE, cls: Json = CLASS) -> Iterator[None]:
        api, templates = self.cluster.api, "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
        api.request("POST", "/apis/resource.k8s.io/v1/deviceclasses", cls)
        api.request("POST", templates, shape)
        try:
            yield
        finally:
            api.request("DELETE", templates)
            api.request("DELETE", f"/apis/resource.k8s.io/v1/deviceclasses/{cls['metadata']['name']}")

    def settle(self, make: Callable[[str], Json]) -> None:
        """Until a first pod is bound, and gone: kube-scheduler and kube-controller-manager have begun."""
        self.cluster.create([make("first")])
        self.cluster.pods.wait("a pod bound", lambda now: "nodeName" in now.get("first", {}).get("spec", {}), 120)
        self.cluster.delete_all(300)

    # -- how soon

    def soon(self, repeats: int) -> dict[str, Any]:
        """Seconds from a start to the registration, from a kubelet's wipe until the slice is there again, from a fault to the taint."""
        found: dict[str, list[float]] = {"started": [], "started_after_kill": [], "slice_back": [], "taint": []}
        moments = random.Random(0)
        with self.driver("default") as there:
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
                began, tainted = time.monotonic(), _tainted(there)
                control().xid(repeat % 8, 79)
                wait_until("the taint", lambda tainted=tainted: bool(_tainted(there) - tainted), every=0.01)
                found["taint"].append(time.monotonic() - began)
                control().clear()
        return {name: {"p50": round(statistics.median(each), 2), "worst": round(max(each), 2)} for name, each in found.items()}

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
        at: list[float] = []

        def there() -> bool:
            lines = [each for each in self.agent.log() if each["event"] == "registered" and each.get("driver") == DRIVER]
            times = [datetime.fromisoformat(each["timestamp"].replace("Z", "+00:00")).timestamp() for each in lines]
            at[:] = [each for each in times if each > since]
            return bool(at)

        wait_until("the registration", there)
        return at[0]

    # -- many nodes

    def many_nodes(self, rounds: int) -> dict[str, Any]:
        """Pods bound per second on nodes that exist in the API only; the claims exist before kube-scheduler begins. "empty": devices that
        have the two capacities and nothing else, with a class that demands nothing but the driver."""
        self.agent.stop()
        self.cluster.processes.stop("kubelet")
        uids = {}
        for number in range(LARGE_NODES):
            uids[node_name(number)] = self.cluster.api.request("POST", "/api/v1/nodes", node(number))["metadata"]["uid"]
        rates: dict[str, list[float]] = {"gpumgr": [], "empty": []}
        with self._without_driver("raised"), self._objects():
            for turn in range(rounds):
                for way in sorted(rates, reverse=turn % 2 == 1):
                    for name, uid in uids.items():
                        made = resource_slice(name, uid, devices(count=8))
                        for each in made["spec"]["devices"] if way == "empty" else ():
                            del each["attributes"]
                            for capacity in each["capacity"].values():
                                del capacity["requestPolicy"]
                        self.cluster.api.request("POST", SLICES, made)
                    rates[way].append(self._rate())
                    print(f"round {turn + 1}, {LARGE_NODES} nodes, {way}: {rates[way][-1]}", flush=True)
                    self.cluster.api.request("DELETE", SLICES)
        medians = {way: statistics.median(each) for way, each in rates.items()}
        return {"pods_a_second": medians, "ratio": round(medians["gpumgr"] / medians["empty"], 3), "rounds": rates}

    def _rate(self) -> float:
        pid = self.cluster.processes.pid("kube-scheduler")
        names = [f"pod-{index}" for index in range(LARGE_PODS)]
        time.sleep(3)  # kube-scheduler's watches
        os.kill(pid, signal.SIGSTOP)
        made = [claiming(name, "share") for name in names]
        for each in made:
            each["spec"]["nodeSelector"] = {"api-only": "true"}
        self.cluster.create(made)
        self.cluster.pods.wait(
            "claims",
            lambda now: all(now.get(name, {}).get("status", {}).get("resourceClaimStatuses") for name in names),
            120,
        )
        began = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        self.cluster.pods.wait("pods bound", lambda now: all("nodeName" in now[name]["spec"] for name in names), 300)
        seconds = time.monotonic() - began
        self.cluster.delete(names, grace=0)
        self.cluster.wait_gone(names)
        return round(LARGE_PODS / seconds, 1)


def _tainted(node: DraNode) -> set[str]:
    return {device["name"] for each in node.slices() for device in each["spec"]["devices"] if "taints" in device}


def summary(ways: dict[str, list[Measure]]) -> dict[str, Any]:
    def median(values: Sequence[float | None]) -> float | None:
        return None if None in values else round(statistics.median([each for each in values if each is not None]), 2)

    return {
        way: {
            "bound_seconds": median([each.bound for each in measures]),
            "running_seconds": median([each.running_seconds for each in measures]),
            "running": statistics.median(each.running for each in measures),
            "rounds": [each._asdict() for each in measures],
        }
        for way, measures in ways.items()
    }


def run(rounds: int, sizes: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
    cluster = Cluster()
    cluster.start()
    found: dict[str, Any] = {}
    try:
        bench = Bench(cluster)
        if "soon" in parts:
            found["soon_seconds"] = bench.soon(rounds)
            print(found["soon_seconds"], flush=True)
        if "pods" in parts:
            ways = {"claims": bench.claims, "empty": bench.empty, "nothing": bench.nothing, "plugin": bench.plugin}
            keys = [(limits, size) for limits in CONTROLLER_LIMITS for size in sizes]
            taken: dict[tuple[str, int], dict[str, list[Measure]]] = {key: {way: [] for way in ways} for key in keys}
            for turn in range(rounds):
                # The empty driver publishes what the agent has published before.
                order = ["claims", "empty", "nothing", "plugin"] if turn % 2 == 0 else ["plugin", "nothing", "empty", "claims"]
                for limits in CONTROLLER_LIMITS:
                    for way in order:
                        with ways[way](limits) as make:
                            bench.settle(make)
                            for size in sizes:
                                into = taken[limits, size][way]
                                into.append(crowd(cluster, make, size, PATIENCE_SECONDS.get(way, 300.0)))
                                print(f"round {turn + 1}: {size} pods, {limits} limits, {way}: {into[-1]}", flush=True)
            found["pods_at_once"] = {f"{size} {limits}": summary(each) for (limits, size), each in taken.items()}
        if "nodes" in parts:
            found["many_nodes"] = bench.many_nodes(rounds)
        return found
    except BaseException:
        if logs := os.environ.get("GPUMGR_E2E_LOGS"):
            cluster.keep_logs(Path(logs))
        raise
    finally:
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 80])
    parser.add_argument("--parts", nargs="+", choices=["soon", "pods", "nodes"], default=["soon", "pods", "nodes"])
    arguments = parser.parse_args()
    figures = run(arguments.rounds, arguments.sizes, arguments.parts)
    arguments.output.write_text(json.dumps({"claims": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
