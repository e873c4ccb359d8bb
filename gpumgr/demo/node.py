"""The stage: a simulated node with its GPUs, kubelet and API server in this process, and the real agent in another one."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.allocator.ledger import Ledger
from gpumgr.checkpoint.reader import read_checkpoint
from gpumgr.demo.journal import Journal
from gpumgr.demo.process import COMMAND, AgentProcess
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.control import SimControl
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimKubelet, SimPod
from gpumgr.units import KINDS, RESOURCE_OF

NODE_NAME: Final = "demo-node"
NAMESPACE: Final = "demo"
SAMPLE_PERIOD_SECONDS: Final = 0.25

Facts = dict[str, Any]


class Node:
    """Make it with `open_node`.

    `pods` are those that came and were not deleted; `labels` is what people call a GPU ("GPU3"), by its name and by its UUID, once
    `graph` was asked.
    """

    def __init__(
        self, folder: Path, kubelet: SimKubelet, api: SimApiServer | None, agent: AgentProcess, http: aiohttp.ClientSession
    ) -> None:
        self.folder, self.kubelet, self.api, self.agent, self.journal = folder, kubelet, api, agent, agent.journal
        self.control = SimControl(folder / "gpus" / "control.txt")
        self.pods: dict[str, SimPod] = {}
        self.labels: dict[str, str] = {}
        self._http = http
        self._numbers = itertools.count(1)

    # -- the agent ---------------------------------------------------------------------------------------------------------

    async def start_agent(self, environ: Mapping[str, str] | None = None) -> None:
        """Starts it and waits until the kubelet can give out its ids. Raises AgentEndedError."""
        await self.agent.start(environ)
        await self.until_offered()

    async def until_offered(self) -> None:
        """Both resources are registered and have a healthy id. Raises AgentEndedError."""
        await self.agent.while_running(self._offered())

    async def _offered(self) -> None:
        for kind in KINDS:
            await self.kubelet.until_allocatable(RESOURCE_OF[kind])

    @property
    def url(self) -> str:
        """Where the agent's newest life serves its pages."""
        return str(self.journal.find("web_listening")[-1]["url"])

    async def graph(self) -> list[Facts]:
        """The agent's GPUs in NVML's order, as /graph tells them; those that the driver does not show come last."""
        async with self._http.get(f"{self.url}/graph", params={"format": "json"}) as answer:
            document = await answer.json()
        gpus = [*sorted(_leaves(document["tree"]), key=lambda gpu: int(gpu["index"])), *document["missing"]]
        shown = [gpu for gpu in gpus if gpu["index"] is not None]
        self.labels |= {gpu[key]: f"GPU{gpu['index']}" for gpu in shown for key in ("name", "uuid")}
        return gpus

    async def metrics(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, labels) -> value, of the last rendering."""
        async with self._http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def ledger(self) -> Ledger:
        """What the agent's checkpoint holds; its laws are checked. Raises ValueError if one is broken."""
        return read_checkpoint(self.folder / "checkpoint").ledger.check()

    # -- pods --------------------------------------------------------------------------------------------------------------

    def pod(self, name: str, *containers: SimContainer) -> SimPod:
        """A pod that the scheduler has bound to this node."""
        return SimPod(namespace=NAMESPACE, name=name, uid=f"uid-{next(self._numbers)}", containers=containers)

    async def run(self, pod: SimPod) -> PodStatus:
        """The pod comes to the node, is admitted and started; a refused one is Failed."""
        self.show(pod, PodStatus(phase="Pending"))
        status = await self.kubelet.run(pod)
        self.show(pod, status)
        return status

    def show(self, pod: SimPod, status: PodStatus) -> None:
        """The API server tells this of the pod."""
        self.pods[pod.uid] = pod
        if self.api is not None:
            self.api.put(pod, status)

    def delete(self, pod: SimPod) -> None:
        del self.pods[pod.uid]
        self.kubelet.delete(pod.uid)
        if self.api is not None:
            self.api.remove(pod.uid)

    def gpus_of(self, pod: SimPod) -> frozenset[str]:
        """Names of the GPUs whose ids the kubelet gave to the pod's containers."""
        return frozenset(
            device_id.rpartition("-")[0]
            for container in pod.containers
            for kind in KINDS
            for device_id in self.kubelet.held(pod.uid, container.name, RESOURCE_OF[kind])
        )

    def disagreements(self) -> list[str]:
        """Where the agent's checkpoint and the kubelet differ about the pods that hold something; empty as it should be."""
        ledger, found = self.ledger(), list[str]()
        for pod in self.pods.values():
            for container in pod.containers:
                mine = [a for a in ledger.of((pod.namespace, pod.name), pod.uid) if a.container == container.name]
                for kind in KINDS:
                    theirs = self.kubelet.held(pod.uid, container.name, RESOURCE_OF[kind])
                    ours = frozenset(text for a in mine for text in ledger.cards.format(kind, a.held(kind)))
                    if ours != theirs:
                        found.append(
                            f"{pod.name} ({container.name}): the kubelet gave it {len(theirs)} {kind} ids, the ledger has {len(ours)}, "
                            f"{len(ours & theirs)} of them the same"
                        )
        return found

    def healthy(self, gpu: str) -> Mapping[str, int]:
        """Kind -> number of this GPU's ids that the kubelet may give out or keep in use."""
        return {
            kind: sum(
                healthy
                for device_id, (healthy, _) in self.kubelet.devices(RESOURCE_OF[kind]).items()
                if device_id.rpartition("-")[0] == gpu
            )
            for kind in KINDS
        }


@contextlib.asynccontextmanager
async def open_node(
    folder: Path,
    *,
    sim: str = "hgx-h100-8",
    api_server: bool = True,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    command: Sequence[str] = COMMAND,
    journal: Journal | None = None,
    **kubelet_options: Any,
) -> AsyncIterator[Node]:
    """A node without its agent yet (`start_agent`); at the end everything is ended. `folder` must have a short path.

    `settings` go over the node's own, section by section; `command` starts the agent.
    """
    (folder / "gpus").mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)))
        api = await stack.enter_async_context(SimApiServer(NODE_NAME)) if api_server else None
        kubelet = await stack.enter_async_context(SimKubelet(folder, **kubelet_options))
        config = folder / "gpumgr.yaml"
        config.write_text(yaml.safe_dump(_settings(folder, api, settings or {})), encoding="utf-8")
        arguments = ["run", "--config", str(config), "--sim", sim, "--sim-dir", str(folder / "gpus")]
        agent = AgentProcess(arguments, journal or Journal(), command=command)
        stack.push_async_callback(agent.close)
        yield Node(folder, kubelet, api, agent, http)


def _settings(folder: Path, api: SimApiServer | None, over: Mapping[str, Mapping[str, object]]) -> Facts:
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
        # Simulated GPUs, so nothing of this host may limit them: neither its MPS nor its containers.
        "enforcement": {"backend": "none", "run_dir": str(folder / "run"), "cdi_dir": str(folder / "cdi")},
        "mps": {"control_program": str(folder / "no-mps")},
        "cri": {"socket": str(folder / "cri.sock")},
        "http": {"port": 0, "socket": str(folder / "agent.sock")},
        "display": {"socket": str(folder / "display.sock")},
        "log": {"format": "json"},
        "process": {"lock_path": str(folder / "agent.lock")},
    }
    return {section: {**own.get(section, {}), **over.get(section, {})} for section in {**own, **over}}


def _leaves(node: Facts) -> list[Facts]:
    if node.get("gpu"):
        return [node["gpu"]]
    return [leaf for child in node.get("children", ()) for leaf in _leaves(child)]
