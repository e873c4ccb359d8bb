"""The agent under test: its settings, its process, and its ledger as its own command shows it."""

import http.client
import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.cli import group
from tests.agent_settings import Sections, changed, settings_in

from .cluster import Cluster
from .manifests import CORE, MEMORY, Json
from .places import AGENT_STATE, CDI_SPECS, CONTAINERD_SOCKET, DEVICE_PLUGINS, NODE, POD_RESOURCES, PROJECT, RUN_DIR
from .podresources import Place, PodResources
from .processes import StartError, free_ports, start_time, wait_until, whole_lines

SIM = "hgx-h100-8"


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


def has_both(offered: Mapping[str, int]) -> bool:
    return all(offered.get(resource) for resource in (CORE, MEMORY))


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

    def settings(self) -> Sections:
        """The usual ones on this cluster."""
        own: Sections = {
            "node": {"name": NODE},
            "kubelet": {"device_plugin_dir": str(DEVICE_PLUGINS), "pod_resources_socket": str(POD_RESOURCES)},
            "kubernetes": {"kubeconfig": str(self._cluster.kubeconfig("gpumgr"))},
            "enforcement": {"backend": "none", "run_dir": str(RUN_DIR), "cdi_dir": str(CDI_SPECS)},
            "cri": {"socket": str(CONTAINERD_SOCKET)},
            "http": {"port": self.port},
        }
        return settings_in(AGENT_STATE, own)

    def configure(self, changes: Sections) -> None:
        """Settings of the next start: the usual ones with these changes."""
        self._settings = changed(self.settings(), changes)
        self._config.write_text(yaml.safe_dump(self._settings))

    @contextmanager
    def configured(self, changes: Sections) -> Iterator[None]:
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

    def get(self, path: str) -> str:
        """The answer of its web server. Raises OSError or HTTPException if there is none, or if it is an error."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, labels) -> value, of one scrape."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}

    def state(self) -> Json:
        """What its page shows."""
        found: Json = json.loads(self.get("/api/state"))
        return found

    def gpu_index(self, gpu: str) -> int:
        """NVML's index of a GPU that the ledger calls so."""
        return next(int(each["index"]) for each in json.loads(self.get("/graph?format=json"))["gpus"] if each["name"] == gpu)

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
        return has_both(self.offered())

    def is_ready(self) -> bool:
        """What its readiness probe says: what the kubelet still offers of an agent that has ended is not ours."""
        with suppress(OSError, http.client.HTTPException):
            self.get("/readyz")
            return True
        return False

    def wait_offered(self, timeout: float = 60) -> None:
        """Waits until both resources are offered."""

        def both() -> dict[str, int]:
            self.check()
            offered = self.offered()
            return offered if has_both(offered) and self.is_ready() else {}

        offered = wait_until("both resources offered", both, timeout, every=0.02)
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
