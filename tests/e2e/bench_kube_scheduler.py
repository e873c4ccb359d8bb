"""The extender below a real kube-scheduler with nodes that exist in the API only, beside the same kube-scheduler without an extender.

`python -m tests.e2e.bench_kube_scheduler --output FILE` (root). All kube-schedulers have the shipped configuration. Rounds are
interleaved. Pods are created while kube-scheduler is stopped by SIGSTOP, so that their creation is not measured.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from gpumgr.kube.cluster_annotations import INVENTORY_ANNOTATION, Inventory, InventoryGpu, encode, levels_of
from gpumgr.placement.topology.matrix import topology_from_matrix

from .cluster import Cluster
from .manifests import CORE, MEMORY, Json, container, pod
from .places import PROJECT, STATE
from .processes import free_ports, wait_until

GPUS: Final = 8
GPU_MEBIBYTES: Final = 16384
PLAIN, OURS = "plain", "gpumgr-scheduler"
REPLICAS: Final = ("extender-a", "extender-b")
LEASE: Final = "/apis/coordination.k8s.io/v1/namespaces/default/leases/gpumgr-scheduler"
_LEVELS = levels_of(topology_from_matrix([["X" if a == b else "NV4" for b in range(GPUS)] for a in range(GPUS)]))
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def node_name(number: int) -> str:
    return f"gpu-node-{number:04d}"


def inventory(name: str, model: str = "NVIDIA A100-SXM4-80GB") -> str:
    gpus = tuple(InventoryGpu(uuid=f"GPU-{name}-{gpu}", model=model, memory=GPU_MEBIBYTES, numa=gpu // 4) for gpu in range(GPUS))
    return encode(Inventory(topology_manager="none", gpus=gpus, levels=_LEVELS))


def node(number: int) -> Json:
    name = node_name(number)
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "250", CORE: str(100 * GPUS), MEMORY: str(64 * GPUS)}
    labels = {"kubernetes.io/hostname": name, "api-only": "true"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {INVENTORY_ANNOTATION: inventory(name)}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def gpu_pod(name: str, scheduler: str, model: str = "", cores: int = 50, memory: int = 32) -> Json:
    made = pod(name, [container("main", cores, memory)], bound=False)
    made["spec"].update({"schedulerName": scheduler, "nodeSelector": {"api-only": "true"}})
    if model:
        made["metadata"].setdefault("annotations", {})["gpumgr.io/use-gpu-model"] = model
    return made


class Backlog(NamedTuple):
    """CPU milliseconds are those for each pod."""

    pods_a_second: float
    extender_cpu_ms: float
    kube_scheduler_cpu_ms: float


class Bench:
    """Both kube-schedulers on one cluster of API-only nodes; pods that name neither's profile wait for nothing."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.ports = dict(zip(REPLICAS, free_ports(2), strict=True))

    def prepare(self) -> None:
        self.cluster.processes.stop("kubelet")
        self.cluster.processes.stop("kube-scheduler")
        for number in range(self.nodes):
            self.cluster.api.request("POST", "/api/v1/nodes", node(number))

    @contextmanager
    def kube_scheduler(self, name: str, extender: str | None = None) -> Iterator[None]:
        """With the configuration that is shipped; `extender` is the replica that it calls."""
        config = yaml.safe_load((PROJECT / "config" / "scheduler" / "kube-scheduler.yaml").read_text())
        config["clientConnection"]["kubeconfig"] = str(self.cluster.kubeconfig("admin"))
        config["profiles"][0]["schedulerName"] = name
        if extender is None:
            del config["extenders"]
        else:
            config["extenders"][0] |= {"urlPrefix": f"http://127.0.0.1:{self.ports[extender]}/scheduler", "httpTimeout": "30s"}
        file = STATE / f"{name}.yaml"
        file.write_text(json.dumps(config))
        binary = self.cluster.binaries / "kubernetes" / "kube-scheduler"
        (port,) = free_ports(1)
        self.cluster.processes.start(name, [binary, f"--config={file}", f"--secure-port={port}", f"--cert-dir={STATE / name}"])
        try:
            self.settle(name)
            yield
        finally:
            self.cluster.processes.stop(name)

    def settle(self, scheduler: str) -> None:
        """Until a first pod is bound, and then until it is gone: caches are filled."""
        self.cluster.create([gpu_pod("first", scheduler)])
        self.wait_bound(["first"])
        self.end(["first"])

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
        command = [sys.executable, "-m", "gpumgr", "scheduler", f"--kubeconfig={self.cluster.kubeconfig('admin')}"]
        settings = [f"scheduler.leader_election={str(election).lower()}", "scheduler.lease_namespace=default", "http.port=0"]
        self.cluster.processes.start(
            name,
            [*command, f"--listen=127.0.0.1:{self.ports[name]}", "--insecure-loopback", *(f"--set={each}" for each in settings)],
            cwd=PROJECT,
        )

    def status(self, name: str) -> int | None:
        """The status of an answer to filter: 200 of a leader, 503 of another replica, None of a process that does not listen."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[name]), timeout=5) as connection:
            connection.sendall(b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            if answer := connection.recv(4096):
                return int(answer.split()[1])
        return None

    def cpu_seconds(self, name: str) -> float:
        fields = Path(f"/proc/{self.cluster.processes.pid(name)}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    # -- pods

    def wait_bound(self, names: Sequence[str], timeout: float = 300) -> float:
        """The time (monotonic clock) at which the watch has shown all of them on nodes."""
        missing = set(names)

        def bound(pods: Any) -> bool:
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
        self.cluster.create(gpu_pod(name, scheduler) for name in names)
        before, began = (self.cpu_seconds(REPLICAS[0]), self.cpu_seconds(scheduler)), time.monotonic()
        os.kill(pid, signal.SIGCONT)
        ended = self.wait_bound(names)
        extender, kube_scheduler = (
            round(1000 * (self.cpu_seconds(each) - then) / number, 2)
            for each, then in zip((REPLICAS[0], scheduler), before, strict=True)
        )
        self.end(names)
        return Backlog(round(number / (ended - began), 1), extender, kube_scheduler)

    def rejected(self, number: int) -> list[str]:
        """Creates pods that no node can take, and waits until each has been tried."""
        names = [f"rejected-{each}" for each in range(number)]
        self.cluster.create(gpu_pod(name, OURS, "H100") for name in names)
        wait_until("rejections", lambda: all(_tried(self.cluster.pods.all().get(name, {})) for name in names), 300, every=0.2)
        return names

    def wakes(self, repeats: int) -> list[float]:
        """Seconds from a node's new inventory to the binding of the one pod, of all that wait, which it helps."""
        found = []
        for repeat in range(repeats):
            name, target = f"woken-{repeat}", node_name(repeat)
            self.cluster.create([gpu_pod(name, OURS, "GB200")])
            wait_until("a rejection", lambda name=name: _tried(self.cluster.pods.all().get(name, {})))
            time.sleep(3)  # its backoff ends, and the events that its creation made
            began = time.monotonic()
            self.describe(target, inventory(target, "NVIDIA GB200"))
            found.append(self.wait_bound([name]) - began)
            self.end([name])
            self.describe(target, inventory(target))
        return found

    def describe(self, name: str, text: str) -> None:
        found = self.cluster.api.request("GET", f"/api/v1/nodes/{name}")
        found["metadata"]["annotations"][INVENTORY_ANNOTATION] = text
        self.cluster.api.request("PUT", f"/api/v1/nodes/{name}", found)

    def stream(self, seconds: float, rate: float, repeats: int) -> dict[str, Any]:
        """CPU-only pods at this rate; beside them, now and then, a GPU pod that fits."""
        names = []
        before, began = self.cpu_seconds(REPLICAS[0]), time.monotonic()
        with ThreadPoolExecutor(repeats) as threads:
            waits = []
            for number in range(int(seconds * rate)):
                time.sleep(max(0.0, began + number / rate - time.monotonic()))
                names.append(f"cpu-{number}")
                self.cluster.create([gpu_pod(names[-1], OURS, cores=0, memory=0)])
                if number % int(seconds * rate / repeats) == 0:
                    names.append(f"fits-{number}")
                    self.cluster.create([gpu_pod(names[-1], OURS)])
                    waits.append((time.monotonic(), threads.submit(self.wait_bound, [names[-1]])))
            percent = 100 * (self.cpu_seconds(REPLICAS[0]) - before) / (time.monotonic() - began)
            spread = _spread([bound.result() - created for created, bound in waits])
        self.wait_bound(names)
        self.end(names)
        return {"extender_core_percent": round(percent, 1), "new_pod_bound_seconds": spread}

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
        return taken


def _tried(found: Json) -> bool:
    return any(each["type"] == "PodScheduled" for each in found.get("status", {}).get("conditions") or ())


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 3), "worst": round(max(values), 3)}


def run(nodes: int, rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    cluster = Cluster()
    cluster.start()
    try:
        bench = Bench(cluster, nodes)
        bench.prepare()
        rates: dict[str, dict[str, list[Backlog]]] = {str(size): {PLAIN: [], OURS: []} for size in sizes}
        with bench.extender(REPLICAS[0]):
            for number in range(rounds):
                for name in sorted((PLAIN, OURS), reverse=number % 2 == 1):
                    with bench.kube_scheduler(name, REPLICAS[0] if name == OURS else None):
                        for size in sizes:
                            rates[str(size)][name].append(bench.backlog(name, size))
            print(json.dumps(rates), file=sys.stderr, flush=True)
            found: dict[str, Any] = {"nodes": nodes, "pods_a_second": {size: _rates(each) for size, each in rates.items()}}
            with bench.kube_scheduler(OURS, REPLICAS[0]):
                waiting = bench.rejected(200)
                found["woken_among_200_seconds"] = _spread(bench.wakes(10))
                bench.end(waiting)
                waiting = bench.rejected(500)
                found["among_500"] = bench.stream(30, 10, 10)
                bench.end(waiting)
        with bench.extender(*REPLICAS):
            found["takeover_seconds"] = {
                "SIGTERM": [round(bench.takeover(cluster.processes.stop), 2) for _ in range(2)],
                "SIGKILL": [round(bench.takeover(cluster.processes.kill), 2) for _ in range(2)],
            }
        cluster.api.request("DELETE", LEASE)
        return found
    except BaseException:
        if logs := os.environ.get("GPUMGR_E2E_LOGS"):
            cluster.keep_logs(Path(logs))
        raise
    finally:
        cluster.stop()


def _rates(found: dict[str, list[Backlog]]) -> dict[str, Any]:
    ours, plain = (statistics.median(each.pods_a_second for each in found[name]) for name in (OURS, PLAIN))
    rounds = {name: [each._asdict() for each in rounds] for name, rounds in found.items()}
    return {"gpumgr": ours, "plain": plain, "ratio": round(ours / plain, 2), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 1000])
    arguments = parser.parse_args()
    figures = run(arguments.nodes, arguments.rounds, arguments.sizes)
    arguments.output.write_text(json.dumps({"kube_scheduler": figures}, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
