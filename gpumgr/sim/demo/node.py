"""A simulated node: its GPUs, kubelet, container runtime and API server are in this process, and the real agent is a child process."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.common.units import RESOURCE_NAMES, RESOURCES, VCUDA_NAMES, GpuName
from gpumgr.ledger.ids import gpu_name
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.store import read_checkpoint
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.control import SimControl, SimLoad, SimProcess
from gpumgr.sim.demo.process import COMMAND, AgentLog, AgentProcess
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimKubelet, SimPod
from gpumgr.sim.library import SimProcesses
from gpumgr.sim.nodes import NodeDescription, load_node
from gpumgr.sim.runtime import SimRuntime

NODE_NAME: Final = "demo-node"
NAMESPACE: Final = "demo"
SAMPLE_PERIOD_SECONDS: Final = 0.25
#: Names in the node's folder: the folder of simulated GPUs and processes, and the agent's settings file.
_GPUS: Final = "gpus"
_CONFIG: Final = "gpumgr.yaml"

Facts = dict[str, Any]
Sections = Mapping[str, Mapping[str, object]]
#: (name, labels) -> value.
Metrics = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What a container's process uses on each GPU of the container."""

    pod: SimPod
    container: str = "main"
    memory_bytes: int
    sm_percent: int = 0


class SimulatedNode:
    """A simulated node, made by `open_node`. `config`: the agent's settings file. `pods`: existing pods by UID. `indices`: NVML's indices
    by GPU name. `control` causes faults of the GPUs and the driver."""

    def __init__(
        self,
        folder: Path,
        description: NodeDescription,
        kubelet: SimKubelet,
        runtime: SimRuntime,
        api: SimApiServer | None,
        agent: AgentProcess,
        http: aiohttp.ClientSession,
    ) -> None:
        self.folder, self.description, self.agent, self.agent_log = folder, description, agent, agent.agent_log
        self.kubelet, self.runtime, self.api = kubelet, runtime, api
        self.config = folder / _CONFIG
        self.control = SimControl(folder / _GPUS / "control.txt")
        self.pods: dict[str, SimPod] = {}
        self.indices: dict[GpuName, int] = {}
        for index in range(len(description.gpus)):
            self.indices[gpu_name(description.uuid_of(index), self.indices)] = index
        self._processes, self._load = runtime.processes, SimLoad(self.control, description)
        self._http = http
        self._numbers = itertools.count(1)

    # -- the agent ---------------------------------------------------------------------------------------------------------

    async def start_agent(self, environ: Mapping[str, str] | None = None) -> None:
        """Starts the agent; returns when the kubelet can allocate the agent's device ids. Raises AgentEndedError."""
        await self.agent.start(environ)
        await self.until_offered()

    async def until_offered(self) -> None:
        await self.agent.while_running(self._offered())

    async def _offered(self) -> None:
        for kind in RESOURCES:
            await self.kubelet.until_allocatable(RESOURCE_NAMES[kind])

    @property
    def url(self) -> str:
        return str(self.agent_log.find("web_listening")[-1]["url"])

    async def graph(self) -> list[Facts]:
        """GPUs from /graph in NVML's order; GPUs that the driver does not list are last."""
        async with self._http.get(f"{self.url}/graph", params={"format": "json"}) as answer:
            document = await answer.json()
        return sorted(document["gpus"], key=lambda gpu: (gpu["index"] is None, gpu["index"] or 0))

    async def maintain(self, action: str, gpu: GpuName, *, reason: str = "") -> Facts:
        """Sends a maintenance request over root's unix socket, as `gpumgr gpu` does. Raises aiohttp.ClientError if it is refused."""
        connector = aiohttp.UnixConnector(path=str(self.folder / "agent.sock"))
        async with (
            aiohttp.ClientSession(connector=connector, raise_for_status=True) as http,
            http.post(f"http://agent/api/gpus/{gpu}/{action}", json={"reason": reason, "evict": False}) as answer,
        ):
            done: Facts = await answer.json()
            return done

    async def metrics(self) -> Metrics:
        async with self._http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def memory_used(self) -> Mapping[tuple[str, str, str], float]:
        used = [
            (dict(labels), value)
            for (name, labels), value in (await self.metrics()).items()
            if name == "gpumgr_container_memory_used_bytes"
        ]
        return {(labels["pod"], labels["container"], labels["gpu"]): value for labels, value in used}

    def ledger(self) -> Ledger:
        """The ledger in the agent's checkpoint. Raises ValueError if it violates an invariant."""
        return read_checkpoint(self.folder / "checkpoint").ledger.check()

    # -- pods --------------------------------------------------------------------------------------------------------------

    def pod(self, name: str, *containers: SimContainer) -> SimPod:
        return SimPod(namespace=NAMESPACE, name=name, uid=f"uid-{next(self._numbers)}", containers=containers)

    async def run(self, pod: SimPod) -> PodStatus:
        """Admits the pod and starts its containers; a refused pod is Failed."""
        self.set_status(pod, PodStatus(phase="Pending"))
        status = await self.kubelet.run(pod)
        if status.phase == "Running":
            for container in pod.admission_order:
                self.runtime.run(pod, container.name)
                if container.kind == "init":
                    self.runtime.end(pod.uid, container.name)
        self.set_status(pod, status)
        return status

    async def restart_container(self, pod: SimPod) -> None:
        """Replaces the process of the container `main`; the new one uses nothing yet. Raises SimKubeletError if it can't start."""
        self._load.remove(self.runtime.end(pod.uid, "main"))
        await self.kubelet.start_container(pod, "main")
        self.runtime.run(pod, "main")

    def set_status(self, pod: SimPod, status: PodStatus) -> None:
        self.pods[pod.uid] = pod
        if self.api is not None:
            self.api.put(pod, status)

    def delete(self, pod: SimPod) -> None:
        if self.api is not None:
            self.api.remove(pod.uid)
        self.remove_from_kubelet(pod.uid)

    def remove_from_kubelet(self, uid: str) -> None:
        """Removes the pod from the kubelet and ends its processes. Call it only for a pod that the API server does not have."""
        self.pods.pop(uid, None)
        self._load.remove(self.runtime.remove(uid))
        self.kubelet.delete(uid)

    def gpus_of(self, pod: SimPod) -> frozenset[GpuName]:
        return frozenset[GpuName]().union(*(self._gpus_of(pod, container.name) for container in pod.containers))

    # -- what the processes do ---------------------------------------------------------------------------------------------

    def running(self) -> Iterator[tuple[SimPod, SimContainer, frozenset[GpuName]]]:
        for pod in list(self.pods.values()):
            for container in pod.containers:
                if container.cores and self.runtime.running(pod.uid, container.name) is not None:
                    yield pod, container, self._gpus_of(pod, container.name)

    def use(self, pod: SimPod, container: str = "main", *, memory_bytes: int, sm_percent: int = 0) -> None:
        self.use_all([Use(pod=pod, container=container, memory_bytes=memory_bytes, sm_percent=sm_percent)])

    def use_all(self, uses: Iterable[Use]) -> None:
        """Sets all uses in one change; ignores containers that do not run."""
        self._load.put(
            (self.indices[gpu], SimProcess(pid=running.pid, memory_bytes=use.memory_bytes, sm_percent=use.sm_percent))
            for use in uses
            if (running := self.runtime.running(use.pod.uid, use.container)) is not None and running.pid is not None
            for gpu in self._gpus_of(use.pod, use.container)
        )

    def start_process_outside_containers(self, gpu: int, *, memory_bytes: int, sm_percent: int = 0) -> int:
        pid = self._processes.start()
        self._load.put([(gpu, SimProcess(pid=pid, memory_bytes=memory_bytes, sm_percent=sm_percent))])
        return pid

    def end_process_outside_containers(self, pid: int) -> None:
        self._processes.end(pid)
        self._load.remove([pid])

    def _gpus_of(self, pod: SimPod, container: str) -> frozenset[GpuName]:
        ids = [each for resource in VCUDA_NAMES for each in self.kubelet.held(pod.uid, container, resource)]
        return frozenset(device_id.rpartition("-")[0] for device_id in ids)

    # -- kubelet and ledger ------------------------------------------------------------------------------------------------

    def disagreements(self) -> list[str]:
        """Sentences about containers with other device ids in the kubelet than in the ledger."""
        ledger, found = self.ledger(), list[str]()
        for pod in self.pods.values():
            for container in pod.containers:
                mine = [a for a in ledger.of((pod.namespace, pod.name), pod.uid) if a.container == container.name]
                for kind in RESOURCES:
                    theirs = self.kubelet.held(pod.uid, container.name, RESOURCE_NAMES[kind])
                    ours = frozenset(text for a in mine for text in ledger.gpu_registry.format(kind, a.held(kind)))
                    if ours != theirs:
                        found.append(
                            f"{pod.name} ({container.name}): the kubelet gave it {len(theirs)} {kind} ids, the ledger has {len(ours)}, "
                            f"{len(ours & theirs)} of them the same"
                        )
        return found

    def healthy(self, gpu: str) -> Mapping[str, int]:
        """Kind of resource -> how many device ids of the GPU are healthy in the kubelet."""
        return {
            kind: sum(
                healthy
                for device_id, (healthy, _) in self.kubelet.devices(RESOURCE_NAMES[kind]).items()
                if device_id.rpartition("-")[0] == gpu
            )
            for kind in RESOURCES
        }


@contextlib.asynccontextmanager
async def open_node(
    folder: Path,
    *,
    sim: str = "hgx-h100-8",
    api_server: bool = True,
    settings: Sections | None = None,
    command: Sequence[str] = COMMAND,
    agent_log: AgentLog | None = None,
    runtime: SimRuntime | None = None,
    **kubelet_options: Any,
) -> AsyncIterator[SimulatedNode]:
    """A node; `start_agent` starts its agent. Everything ends at the exit. The path of `folder` must be short, because unix sockets in it
    may have paths of at most 107 bytes.

    `settings` override the node's own; `command` starts the agent; `runtime` (not started yet) replaces the default one.
    """
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        server = SimApiServer(NODE_NAME, on_delete=lambda uid: node.remove_from_kubelet(uid))
        api = await stack.enter_async_context(server) if api_server else None
        kubelet = await stack.enter_async_context(SimKubelet(folder, **kubelet_options))
        runtime = runtime or SimRuntime(folder / "cri.sock", SimProcesses(folder / _GPUS))
        await stack.enter_async_context(runtime)
        config = folder / _CONFIG
        config.write_text(yaml.safe_dump(_settings(folder, runtime, api, settings or {})), encoding="utf-8")
        arguments = ["run", "--config", str(config), "--sim", sim, "--sim-dir", str(folder / _GPUS)]
        agent = AgentProcess(arguments, agent_log or AgentLog(), command=command)
        stack.push_async_callback(agent.close)
        node = SimulatedNode(folder, load_node(sim), kubelet, runtime, api, agent, http)
        yield node


def _settings(folder: Path, runtime: SimRuntime, api: SimApiServer | None, over: Sections) -> Sections:
    """The agent's settings, with all paths in `folder`, so the agent uses nothing of this host. `api` None: the agent runs standalone."""
    kubeconfig = str(api.kubeconfig(folder / "kubeconfig")) if api is not None else None
    own: dict[str, dict[str, object]] = {
        "node": {"name": NODE_NAME},
        "kubelet": {
            "device_plugin_dir": str(folder / "device-plugins"),
            "pod_resources_socket": str(folder / "pod-resources" / "kubelet.sock"),
        },
        "checkpoint": {"dir": str(folder / "checkpoint"), "gpu_manager_checkpoint": str(folder / "gpu-manager.json")},
        "kubernetes": {"enabled": api is not None, "kubeconfig": kubeconfig},
        "nvml": {"sample_period_seconds": SAMPLE_PERIOD_SECONDS},
        "container": {"allocation_dir": str(folder / "vm")},
        # The GPUs are simulated, so the agent must not use this host's backends, MPS program or CDI folder.
        "enforcement": {"backend": "none", "run_dir": str(folder / "run"), "cdi_dir": str(folder / "cdi")},
        "mps": {"control_program": str(folder / "no-mps")},
        "cri": {"socket": str(runtime.socket), "cgroup_root": str(runtime.processes.cgroup_root)},
        "http": {"port": 0, "socket": str(folder / "agent.sock")},
        "display": {"socket": str(folder / "display.sock")},
        "log": {"format": "json"},
        "process": {"lock_path": str(folder / "agent.lock")},
    }
    return {section: {**own.get(section, {}), **over.get(section, {})} for section in {**own, **over}}
