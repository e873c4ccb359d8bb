"""The agent under test: its settings, its process, and its ledger as its own command shows it."""

import http.client
import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.cli import group

from .cluster import Cluster
from .manifests import CORE, MEMORY
from .places import AGENT_STATE, CONTAINERD_SOCKET, DEVICE_PLUGINS, NODE, POD_RESOURCES, PROJECT, RUN_DIR
from .podresources import Place, PodResources
from .processes import StartError, free_ports, start_time, wait_until, whole_lines

SIM = "hgx-h100-8"


def agent_config(kubeconfig: Path, port: int) -> dict[str, Any]:
    """The agent's settings on this cluster; every key that the harness knows is here."""
    return {
        "node": {"name": NODE},
        "kubelet": {"device_plugin_dir": str(DEVICE_PLUGINS), "pod_resources_socket": str(POD_RESOURCES)},
        "kubernetes": {"kubeconfig": str(kubeconfig)},
        "checkpoint": {"dir": str(AGENT_STATE / "checkpoint"), "gpu_manager_checkpoint": str(AGENT_STATE / "none")},
        "process": {"lock_path": str(AGENT_STATE / "agent.lock")},
        "container": {
            "allocation_dir": str(AGENT_STATE / "vm"),
            "driver_share_dir": str(AGENT_STATE / "vdriver" / "nvidia"),
            "driver_whole_dir": str(AGENT_STATE / "vdriver" / "origin"),
        },
        "enforcement": {"backend": "none", "run_dir": str(RUN_DIR)},
        "cri": {"socket": str(CONTAINERD_SOCKET)},
        "http": {"port": port, "socket": str(AGENT_STATE / "agent.sock")},
        "display": {"socket": str(AGENT_STATE / "display.sock")},
    }


@dataclass(frozen=True)
class Holding:
    """One allocation of the ledger."""

    allocation: str
    place: Place
    core_ids: frozenset[str]
    memory_ids: frozenset[str]
    gpus: tuple[str, ...]


def read_ledger(document: Mapping[str, Any]) -> list[Holding]:
    """Normalises what `gpumgr checkpoint show --output json` prints."""
    return [
        Holding(
            str(each["allocation"]),
            (str(each["namespace"]), str(each["pod"]), str(each["container"])),
            frozenset(each["core_ids"]),
            frozenset(each["memory_ids"]),
            tuple(str(gpu) for gpu in each["gpus"]),
        )
        for each in document["allocations"]
    ]


class Agent:
    """`gpumgr run` on a simulated node, as a process of the cluster with this name."""

    def __init__(self, cluster: Cluster, config: Path = AGENT_STATE / "gpumgr.yaml", name: str = "gpumgr") -> None:
        self._cluster, self._name = cluster, name
        self._config = config
        (self.port,) = free_ports(1)
        self.configure({})
        self._resources = PodResources()
        self.running = False
        #: Ids of each resource on a node without pods; known after the first start.
        self.offer: dict[str, int] = {}

    def configure(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Settings of the next start: the usual ones with these changes (section -> key -> value)."""
        settings = agent_config(self._cluster.kubeconfig("gpumgr"), self.port)
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values}
        self._config.write_text(yaml.safe_dump(settings))

    @contextmanager
    def configured(self, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Runs with other settings, and with the usual ones again afterwards."""
        self.stop()
        self.configure(changes)
        self.start()
        try:
            yield
        finally:
            self.stop()
            self.configure({})
            self.start()

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, labels) -> value, of one scrape."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}

    def gpu_index(self, gpu: str) -> int:
        """NVML's index of a GPU that the ledger calls so."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/graph?format=json", timeout=30) as answer:
            return next(int(each["index"]) for each in json.load(answer)["gpus"] if each["name"] == gpu)

    def log(self) -> list[dict[str, Any]]:
        """The lines of its log so far."""
        return [json.loads(line) for line in whole_lines(self._cluster.processes.log(self._name)) if line.startswith("{")]

    def registrations(self) -> int:
        """How many registrations with the kubelet its log has."""
        return sum(line.get("event") == "registered" for line in self.log())

    def close(self) -> None:
        """Ends the agent and the connection to the kubelet."""
        self.stop()
        self._resources.close()

    def start(self, wait: bool = True, *, program: str = "gpumgr", environ: Mapping[str, str] | None = None) -> None:
        """Starts the agent; with `wait`, back when the kubelet offers its ids. `program`: the module that runs it."""
        simulated = ["--sim", SIM, "--sim-dir", str(AGENT_STATE / "sim")]
        command = [sys.executable, "-m", program, "run", "--config", str(self._config), *simulated]
        self._cluster.processes.start(self._name, command, environ, cwd=PROJECT)
        self.running = True
        if wait:
            self.wait_offered()

    def kill(self) -> None:
        """SIGKILL."""
        self._cluster.processes.kill(self._name)
        self.running = False

    def wait_died(self) -> None:
        """Waits until it has ended by itself."""
        pid = self._cluster.processes.pid(self._name)
        wait_until("the agent's end", lambda: start_time(pid) is None)
        self.kill()

    def stop(self) -> int | None:
        """SIGTERM; the exit status."""
        self.running = False
        return self._cluster.processes.stop(self._name)

    def ensure(self, wait: bool = True) -> None:
        """Starts the agent where a failed test left none. Raises StartError once if it has ended by itself: the next test starts it.
        `wait` as for `start`."""
        if self.running:
            self.running = False
            self.check()
            self.running = True
        else:
            self.start(wait)

    def revive(self) -> None:
        """Starts the agent again if it has ended, without its usual offer."""
        try:
            self.check()
        except (KeyError, StartError):
            self.start(wait=False)

    def check(self) -> None:
        """Raises StartError where it has ended."""
        self._cluster.processes.check(self._name)

    def offered(self) -> dict[str, int]:
        """Healthy ids in the kubelet's device manager, by resource (the node object follows up to 1 s later)."""
        return self._resources.allocatable()

    def offers(self) -> bool:
        """Whether the kubelet has healthy ids of both resources: a plugin that answers serves them."""
        offered = self.offered()
        return bool(offered.get(CORE)) and bool(offered.get(MEMORY))

    def is_ready(self) -> bool:
        """What its readiness probe says: what the kubelet still offers of an agent that has ended is not ours."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=30):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def wait_offered(self, timeout: float = 60) -> None:
        """Waits until both resources are offered."""
        offered: dict[str, int] = {}

        def both() -> bool:
            nonlocal offered
            self.check()
            offered = self.offered()
            return bool(offered.get(CORE)) and bool(offered.get(MEMORY)) and self.is_ready()

        wait_until("both resources offered", both, timeout, every=0.02)
        self.offer = self.offer or offered

    def ledger(self) -> list[Holding]:
        """The ledger, which the agent's own command reads from the checkpoint. It runs in this process: the tests ask very often, and a
        process of its own would spend most of a second on imports."""
        arguments = ["checkpoint", "show", "--config", str(self._config), "--output", "json"]
        done = CliRunner().invoke(group, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return read_ledger(json.loads(done.stdout))

    def wait_empty(self) -> None:
        """Waits until nothing is held any more."""
        wait_until("an empty ledger", lambda: not self.ledger(), every=0.3)
