"""Answers Prometheus, the web page, scripts and gpu-manager's clients from memory.

No read request makes the agent call the driver, the kubelet or the API server. /metrics and /api/state are rendered once a sample period,
while they have readers.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gpumgr.agent.api import MaintenanceResult, PodDetails
from gpumgr.agent.maintenance import Maintenance, MaintenanceRequest
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.agent.writer import Agent, AgentView
from gpumgr.common.aio import LatestValue
from gpumgr.compat.gpu_manager.display import usage_message
from gpumgr.compat.gpu_manager.driver_files.node_files import NodeDriverFiles
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.driver.driver import Nvml
from gpumgr.driver.hardware_events import HardwareEvents
from gpumgr.driver.monitor import Monitor
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.kubelet.device_lists import ResourceLists
from gpumgr.kubelet.plugin_registration import KubeletLink
from gpumgr.ledger.history import HistoryEntry
from gpumgr.runtime.memory_limit_watcher import MemoryLimitWatcher
from gpumgr.settings import Settings
from gpumgr.settings.profile import resource_names
from gpumgr.web.metrics import Exposition, Metrics
from gpumgr.web.state import node_state, pod_details

if TYPE_CHECKING:
    from gpumgr.kubelet.dra_side import DraSide


class Enforcement(Protocol):
    """The parts of the node's enforcement that the pages show."""

    vcuda: VcudaBackend
    mps: Mps
    driver_files: NodeDriverFiles
    limits: Enforcer


class Components(Protocol):
    """The parts of the agent that the pages show. `dra` is None in mode plugin."""

    settings: Settings
    metrics: Metrics
    agent: Agent
    agent_state: AgentState
    hardware_events: HardwareEvents
    monitor: Monitor
    nvml: Nvml
    resource_lists: ResourceLists
    memory_watcher: MemoryLimitWatcher
    link: "KubeletLink | DraSide"
    dra: "DraSide | None"

    @property
    def enforcement(self) -> Enforcement: ...


class ReadModel:
    """The data of the pages.

    `api_queue` returns the state of the queue to the API server (None without an API server). `connections` returns the web server's
    numbers: open connections, refused ones, clients that disconnected before their response was complete.
    """

    def __init__(
        self,
        components: Components,
        *,
        pods: Pods,
        maintenance: Maintenance,
        api_queue: Callable[[], ApiQueueState | None],
        connections: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        self._components, self._pods, self._maintenance = components, pods, maintenance
        self._api_queue, self._connections = api_queue, connections
        self._exposition = Exposition(components.metrics, self.report)
        self._states: LatestValue[bytes] = LatestValue(b"")
        self._rendered_at = float("-inf")
        self._rendering = asyncio.Lock()

    # -- once a sample period ----------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        await self._exposition.refresh()
        if self._states.readers:
            async with self._rendering:
                await self._render()

    async def _render(self) -> None:
        report, history, began = self.report(), self.history(), time.monotonic()
        self._states.set(await asyncio.to_thread(lambda: msgspec.json.encode(node_state(report, history))))
        self._rendered_at = began

    # -- for a request -----------------------------------------------------------------------------------------------------

    def report(self) -> NodeReport:
        components, hardware = self._components, self._components.hardware_events
        reasons = {
            uuid: reason for uuid, each in components.monitor.health.items() if (reason := each.effective_reason) is not None
        }
        connections, refused, disconnects = self._connections()
        names, trouble = self._resource_names(), components.enforcement.driver_files.trouble()
        return NodeReport(
            view=self.view(),
            node=components.settings.node.name,
            mode=components.settings.node.mode,
            at=time.time(),
            registered={names.get(kind, kind): state.registered for kind, state in components.link.states.items()},
            not_ready=tuple(self.not_ready()),
            warnings=(*self._slice_troubles(offered=True), *([trouble] if trouble else []), *self._unlisted(some=True)),
            cordons=self._maintenance.cordons,
            api_queue=self._api_queue(),
            connections=connections,
            connections_refused=refused,
            disconnects=disconnects,
            sample=hardware.sample,
            sampled_at=hardware.sampled_at,
            nvml_up=hardware.driver_up,
            nvml_errors=components.nvml.call_errors,
            streams={
                names[kind]: each.readers for kind, each in components.resource_lists.lists.items() if components.dra is None
            },
            reasons=reasons,
            use=components.memory_watcher.use,
            over=components.memory_watcher.over,
            gpu_limits=components.enforcement.limits.gpu_limits,
            vcuda_registrations=dict(components.enforcement.vcuda.registrations),
            mps_daemon_restarts=components.enforcement.mps.restarts(),
        )

    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of the metrics, in the format that these request headers prefer ("": no such header)."""
        return await self._exposition.scrape(accept, accept_encoding)

    def not_ready(self) -> Sequence[str]:
        """Why the node can't run pods with GPUs now; empty if it can."""
        names = self._resource_names()
        reasons = [
            f"{names.get(kind, kind)} is not registered with the kubelet" + (f": {state.error}" if state.error else "")
            for kind, state in self._components.link.states.items()
            if not state.registered
        ]
        return [*reasons, *self._slice_troubles(offered=False), *self.no_driver(), *self._unlisted(some=False)]

    def _resource_names(self) -> Mapping[str, str]:
        """The kubelet's name of each kind of resource. MIG devices have that name in this agent, too."""
        return {str(kind): name for kind, name in resource_names(self._components.settings).items()}

    def _unlisted(self, *, some: bool) -> tuple[str, ...]:
        """The sentence about GPUs that the driver does not list. With `some`, only if the driver lists other GPUs; without, only if it
        lists none."""
        snapshot = self._components.agent_state.inventory.snapshot
        sentence = snapshot.unlisted_sentence if self._components.hardware_events.driver_up else None
        return (sentence,) if sentence is not None and some == bool(snapshot.gpus or snapshot.failures) else ()

    def notes(self) -> Sequence[str]:
        """What the node lacks although it can run pods with GPUs."""
        return self._unlisted(some=True)

    def _slice_troubles(self, *, offered: bool) -> tuple[str, ...]:
        """What is wrong with the node's ResourceSlice. With `offered`, only if the slice still offers GPUs; without, only if it offers
        none."""
        if self._components.dra is None:
            return ()
        state = self._components.dra.publisher.state
        text = state.dropped if state.error is None else f"the ResourceSlice is not published: {state.error}"
        return (text,) if text and offered == (state.published and state.devices > 0) else ()

    def no_driver(self) -> Sequence[str]:
        """Why the driver is not available; empty while it answers."""
        hardware = self._components.hardware_events
        if hardware.driver_up:
            return ()
        return ("the driver's library does not answer" if hardware.sampled_at else "no driver was found yet",)

    def status(self) -> str:
        """The line for `systemctl status`."""
        states, hardware = self._components.link.states.values(), self._components.hardware_events
        mode = "mode dra, " if self._components.dra is not None else ""
        registered = f"{mode}registered {sum(state.registered for state in states)}/{len(states)}"
        if not hardware.driver_up:
            return f"{registered}, no driver: {hardware.down_reason or 'NVML has not answered yet'}"
        view = self.view()
        number = len(view.ledger.gpu_registry.gpus)
        return f"{registered}, {number - len(view.node.out_of_service)} of {number} GPUs offered"

    def view(self) -> AgentView:
        return self._components.agent.view()

    @property
    def states(self) -> LatestValue[bytes]:
        """/api/state as JSON, published once per sample period while there are subscribers. The value before the first one is b""."""
        return self._states

    async def state(self) -> bytes:
        """The JSON of /api/state, not older than a sample period. `states` then has it, too."""
        async with self._rendering:
            if time.monotonic() - self._rendered_at >= self._components.settings.nvml.sample_period_seconds:
                await self._render()
        return self._states.value

    def usage(self) -> Mapping[str, Any]:
        """The data of gpu-manager's page /usage."""
        return usage_message(self.report(), self._pods)

    def history(self) -> Sequence[HistoryEntry]:
        """The entries, oldest first."""
        return self._components.agent_state.history.entries()

    def pod(self, namespace: str, pod: str) -> PodDetails | None:
        return pod_details(self.report(), self._pods.get((namespace, pod)), namespace, pod, self.history())

    async def maintain(self, wanted: MaintenanceRequest) -> MaintenanceResult:
        """Carries out a maintenance request. Raises Refusal if the GPU's state forbids it, InputError for an unknown GPU."""
        return await self._maintenance.execute(wanted)
