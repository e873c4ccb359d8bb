"""The agent as users install it: the chart's DaemonSet, from the image, with a service account of its own.

On this machine's simulated GPUs, which the image knows nothing of: the node's files and the library in the driver's place are made outside
and mounted. What else differs from the chart's defaults is said in `_values` and `_on_this_machine`.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from gpumgr.sim.control import SimControl
from gpumgr.sim.library import compile_library, prepare
from tests.agent_settings import Sections, changed
from tools import chart

from . import image_agent
from .agent import SIM, Agent
from .cluster import Cluster
from .manifests import Json, gpu_pod
from .node import cleared
from .places import AGENT_STATE, NODE, POD_LOGS
from .processes import StartError, free_ports, kill_and_wait, start_time, wait_until, written

NAMESPACE: Final = chart.NAMESPACE
#: Not the chart's default name: its roles would replace the roles of the agent that runs as a process.
NAME: Final = "e2e-gpumgr"
ACCOUNT: Final = f"system:serviceaccount:{NAMESPACE}:{NAME}"
LABEL: Final = "nvidia.com/gpu.present"
STATE: Final = AGENT_STATE / "daemonset"
SIM_DIR: Final = STATE / "sim"
RUN: Final = AGENT_STATE / "daemonset-run"
_SELECTOR: Final = "labelSelector=app.kubernetes.io%2Fname%3Dgpumgr"
_PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Installed(Agent):
    """The DaemonSet, with the face that the tests know of the agent's process."""

    def __init__(self, cluster: Cluster) -> None:
        STATE.mkdir(parents=True, exist_ok=True)
        super().__init__(cluster, STATE / "gpumgr.yaml")
        self.control = SimControl(SIM_DIR / "control.txt")

    # -- what is installed

    def settings(self) -> Sections:
        """The agent's settings: its folders are below one of the harness's, the rest is the chart's."""
        settings = {section: dict(values) for section, values in super().settings().items()}
        del settings["kubernetes"], settings["node"], settings["enforcement"]["cdi_dir"]
        own: Sections = {
            "checkpoint": {"dir": str(STATE / "ledger")},
            "process": {"lock_path": str(STATE / "ledger" / "agent.lock")},
            "container": {"allocation_dir": str(STATE / "vm")},
            "enforcement": {"run_dir": str(RUN)},
            "http": {"address": "127.0.0.1", "socket": str(RUN / "agent.sock")},
            "display": {"socket": str(RUN / "display.sock")},
        }
        return changed(settings, own)

    def _values(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The image by the name it was imported under; the simulated GPUs; an API server that no Service leads to; no pod network."""
        host, _, port = self._cluster.url.removeprefix("https://").partition(":")
        return {
            "image": {
                "repository": image_agent.NAME.partition(":")[0],
                "tag": image_agent.NAME.partition(":")[2],
                "pullPolicy": "Never",
            },
            "fullnameOverride": NAME,
            "settings": self._settings,
            "hostNetwork": True,
            "extraArgs": ["--sim", SIM, "--sim-dir", str(SIM_DIR)],
            "extraEnv": [
                {"name": "KUBERNETES_SERVICE_HOST", "value": host},
                {"name": "KUBERNETES_SERVICE_PORT", "value": port},
                {"name": "XDG_CACHE_HOME", "value": str(SIM_DIR / "cache")},
            ],
            "extraVolumes": [{"name": "sim", "hostPath": {"path": str(SIM_DIR)}}, *changes.pop("more_volumes", ())],
            "extraVolumeMounts": [{"name": "sim", "mountPath": str(SIM_DIR)}, *changes.pop("more_mounts", ())],
            **changes,
        }

    def objects(self, **changes: Any) -> list[Json]:
        """The chart's objects with `changes` of its values."""
        made = [each for each in yaml.safe_load_all(chart.render(self._values(changes))) if each]
        for each in made:
            if each["kind"] == "DaemonSet":
                _on_this_machine(each)
        return made

    def apply(self, objects: Iterable[Json]) -> None:
        self._cluster.apply(objects)

    # -- life

    def prepare(self) -> None:
        """The image and the node: what an administrator has before he installs anything. And the node's simulated GPUs."""
        self._cluster.start_controllers()
        self._cluster.import_image(image_agent.build_image())
        prepare(SIM, SIM_DIR)
        library = compile_library()
        (SIM_DIR / "cache" / "gpumgr").mkdir(parents=True, exist_ok=True)
        (SIM_DIR / "cache" / "gpumgr" / library.name).write_bytes(library.read_bytes())
        self._cluster.kubectl("label", "node", NODE, f"{LABEL}=true", "--overwrite")

    def leave(self) -> None:
        """Restores the node and the cluster: other tests apply DaemonSets that must not run."""
        self._cluster.kubectl("label", "node", NODE, f"{LABEL}-")
        self._cluster.stop_controllers()

    def start(self, wait: bool = True, **changes: Any) -> None:
        """Installs the chart, or changes what is installed; with `wait`, back when the pod of just that serves the kubelet."""
        self.apply(self.objects(**changes))
        self.running = True
        if wait:
            self.wait_rolled()
            self.wait_offered()

    def surge(self, changes: Sections) -> None:
        """Installs it with these changes of the settings as where pods have a network of their own: the next pod starts beside the former
        one, if that is ready. Here both have the host's network, so the next one gets another port. Back at once."""

        def ready() -> bool:
            found = (self.only() or {}).get("status", {}).get("conditions", ())
            return any(each["type"] == "Ready" and each["status"] == "True" for each in found)

        wait_until("the former pod ready", ready, 120)
        (self.port,) = free_ports(1)
        self.configure(changes)
        objects = self.objects()
        for each in objects:
            if each["kind"] == "DaemonSet":
                _with_surge(each)
        self.apply(objects)
        self.running = True

    def stop(self) -> int | None:
        """Uninstalls."""
        self.running = False
        self._cluster.take_away(self.objects())
        wait_until("no pod of the DaemonSet", lambda: not self.agents(), 120)
        return None

    def kill(self) -> None:
        """SIGKILL to the container's process; the kubelet starts another."""
        kill_and_wait([self.pid()])

    def wait_offered(self, timeout: float = 90) -> None:
        try:
            super().wait_offered(timeout)
        except TimeoutError as error:
            raise StartError(f"{error}; the pod's log:\n{self.log_text()[-4000:]}") from error

    def check(self) -> None:
        """Nothing: a container that ends is started again by the kubelet."""

    # -- what is seen of it

    def agents(self) -> list[Json]:
        """Its pods: first the pods that are being deleted, then the pod that is to stay."""
        pods = self._cluster.api.request("GET", f"{_PODS}?{_SELECTOR}")["items"]
        return sorted(pods, key=lambda pod: (_stays(pod), str(pod["metadata"]["creationTimestamp"])))

    def newest(self) -> Json:
        """Its newest pod; between two of them it waits for the next."""
        return wait_until("a pod of the DaemonSet", self.agents)[-1]

    def _task(self) -> tuple[str, int]:
        """The running container's id and the host's process id of its first process. The API server lists a container a moment
        after the kubelet's resources are there, and of its end a moment after it."""

        def tasks() -> list[tuple[str, int]]:
            statuses = self.newest()["status"].get("containerStatuses", [])
            running = {str(each["containerID"]).rpartition("/")[2] for each in statuses if "running" in each["state"]}
            listed = [line.split() for line in self._cluster.ctr("tasks", "list").splitlines()[1:]]
            return [(words[0], int(words[1])) for words in listed if words[0] in running and words[2] == "RUNNING"]

        return wait_until("the agent's container", tasks)[0]

    def pid(self) -> int:
        """The host's process id of the agent."""
        return self._task()[1]

    def started(self) -> float:
        """When (monotonic clock) the agent's process was made, to a hundredth of a second."""
        ticks = start_time(self.pid())
        assert ticks is not None
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - ago

    def renew(self) -> None:
        """Deletes its pod, as `kubectl delete pod` does; back when the DaemonSet's next one runs."""
        old = self.newest()["metadata"]
        self._cluster.api.request("DELETE", f"{_PODS}/{old['name']}")
        self.wait_rolled(old["uid"])

    def only(self) -> Json | None:
        """The pod of what was applied last; None before the DaemonSet has made it, or while there is another one."""
        daemonset = self._cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAME}")
        status, pods = daemonset.get("status", {}), self.agents()
        seen = status.get("observedGeneration") == daemonset["metadata"]["generation"]
        # A pod of the former kind is there until it has ended, in an update with a surge while it serves.
        if seen and status.get("updatedNumberScheduled") == 1 and len(pods) == 1 and _stays(pods[0]):
            return pods[0]
        return None

    def wait_rolled(self, old: str | None = None) -> None:
        """Waits until the pod of what was applied last, and another one than that with the uid `old`, runs alone."""

        def rolled() -> bool:
            pod = self.only()
            return pod is not None and pod["metadata"]["uid"] != old and pod["status"].get("phase") == "Running"

        wait_until("the DaemonSet's next pod", rolled, 120)

    def lose_memory(self) -> None:
        """A boot: the folder that is a tmpfs on a real node is empty."""
        shutil.rmtree(RUN, ignore_errors=True)

    def run_inside(self, *command: str) -> str:
        """Runs a command in the agent's container, as `kubectl exec` does."""
        identity, _ = self._task()
        return self._cluster.ctr("tasks", "exec", "--exec-id", f"e2e-{time.monotonic_ns()}", identity, *command)

    def log_text(self) -> str:
        """What the containers of its newest pod wrote, all their lives."""
        return "\n".join(written(self._log_files()))

    def log(self, container: str = "gpumgr") -> list[dict[str, Any]]:
        """The lines of a container of its newest pod, all its lives."""
        return [json.loads(line) for line in written(self._log_files(container)) if line.startswith("{")]

    def _log_files(self, container: str = "*") -> list[Path]:
        meta = self.newest()["metadata"]
        return sorted(POD_LOGS.glob(f"{NAMESPACE}_{meta['name']}_{meta['uid']}/{container}/*.log"))


def _stays(pod: Json) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def _with_surge(daemonset: Json) -> None:
    """What the chart makes without hostNetwork."""
    daemonset["spec"] |= {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "minReadySeconds": 0,
    }
    (main,) = daemonset["spec"]["template"]["spec"]["containers"]
    name = {"name": "GPUMGR_PROCESS_INSTANCE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    main["env"] = [*(each for each in main.get("env", []) if each["name"] != name["name"]), name]


def _on_this_machine(daemonset: Json) -> None:
    """The agent listens on loopback alone, where the kubelet's probes then have to ask."""
    for container in daemonset["spec"]["template"]["spec"]["containers"]:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            container[probe]["httpGet"]["host"] = "127.0.0.1"


@contextmanager
def shared_mount(folder: Path) -> Iterator[None]:
    """The folder as a shared mount; systemd makes all mounts of a host shared."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "--make-shared", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)


@contextmanager
def installed(cluster: Cluster, process: Agent, changes: Sections | None = None, *, wait: bool = True) -> Iterator[Installed]:
    """The DaemonSet in the place of the agent that other tests run as a process; that one starts again by itself. `changes` of its
    settings; without `wait`, back at once."""
    with cleared(cluster, process) as node:
        # The kubelet forgets ended pods when it admits the next one; an agent without a ledger takes over what the kubelet remembers.
        node.run([gpu_pod("last", 10, 10)])
        node.clear()
    process.stop()
    agent = Installed(cluster)
    agent.configure(changes or {})
    # The same node. At first it may offer less, because of what the kubelet remembers.
    agent.offer = dict(process.offer)
    try:
        agent.prepare()
        with shared_mount(RUN):
            try:
                agent.start(wait)
                yield agent
            finally:
                agent.stop()
    finally:
        agent.close()
        agent.leave()
