"""Creates and connects all objects of the agent. `lifecycle` starts and stops what is built here."""

import contextlib
import os
import platform
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpumgr import __version__
from gpumgr.agent.admission import Admission
from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.gone_gpus import GoneGpus
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.maintenance import Maintenance
from gpumgr.agent.pods import PodEnds, holders_of_other_mode
from gpumgr.agent.ports import Checkpoint
from gpumgr.agent.reconciler import Reconciler
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.agent.writer import Agent
from gpumgr.common.errors import SettingsError
from gpumgr.common.log import set_level
from gpumgr.common.proc import HostProcesses
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import DRA_DRIVER
from gpumgr.compat.gpu_manager.display import DisplayServer
from gpumgr.compat.gpu_manager.running_pods import TakeOver
from gpumgr.driver import Hardware
from gpumgr.driver.hardware_events import HardwareEvents
from gpumgr.driver.health import HealthRules
from gpumgr.driver.monitor import Monitor
from gpumgr.driver.programs import load_modules, reset_gpu
from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.device_lists import ResourceLists
from gpumgr.kubelet.other_plugins import OtherDevicePlugins
from gpumgr.kubelet.plugin_registration import KubeletLink
from gpumgr.kubelet.records import SPECS_SECONDS, PodResourcesClient, stored_nodes
from gpumgr.ledger.answer import DriverAccess, HostPaths
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.node import NodeDevices
from gpumgr.ledger.tables import Loaded
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.placement.devices import NodeSample
from gpumgr.runtime.memory_limit_watcher import TIMEOUT_SECONDS, MemoryLimitWatcher
from gpumgr.runtime.process_owners import ProcessOwners
from gpumgr.settings import Settings, profile
from gpumgr.web.graph import graph_text
from gpumgr.web.handlers import make_app
from gpumgr.web.http_server import PageServer
from gpumgr.web.metrics import Metrics
from gpumgr.web.read_model import ReadModel

if TYPE_CHECKING:
    from gpumgr.kubelet.dra_registration import DraDriver
    from gpumgr.kubelet.dra_side import DraSide
    from gpumgr.node.api_side import ApiSide

#: The checkpoint's note (a stored text) that the take-over from gpu-manager is done.
TAKEN_OVER = "gpu_manager_taken_over"


class Components:
    """The agent and its adapters. Create it inside the event loop. `driver` is gpumgr's DRA driver; None if node.mode is plugin."""

    def __init__(
        self,
        settings: Settings,
        hardware: Hardware,
        *,
        loaded: Loaded,
        checkpoint: Checkpoint,
        api_side: "ApiSide",
        driver: "DraDriver | None",
        enforcement: NodeEnforcement,
    ) -> None:
        """Raises SettingsError if the settings need an API server and there is none."""
        pods, server = api_side.pods, api_side.server
        self.settings, self.loaded, self.api_side = settings, loaded, api_side
        self._hardware, self._checkpoint, self._pods = hardware, checkpoint, pods
        self._processes = HostProcesses(hardware.proc_root)
        self.metrics = self._make_metrics()
        self.resource_lists = ResourceLists(profile.offered(settings), profile.mig_resource(settings), self.metrics)
        self.device_lists = DeviceListPublisher(self._publish, clock=time.monotonic)
        self.agent_state = self._make_agent_state(loaded)
        self.gone_gpus = GoneGpus(self.agent_state, clock=time.monotonic)
        self.enforcement, self.nvml = enforcement, enforcement.nvml
        self.memory_watcher = self._make_memory_watcher()
        self.pod_resources = PodResourcesClient(settings.kubelet.pod_resources_socket, names=profile.inner_names(settings))
        pod_ends = PodEnds(pods, self.enforcement.runtime, node=settings.node.name, clock=time.monotonic)
        self.admission = Admission(
            pods,
            self.pod_resources,
            pod_ends,
            pod_wait_seconds=lambda: self.settings.kubernetes.pod_wait_milliseconds / 1000,
            clock=time.monotonic,
        )
        self.reconciler = Reconciler(
            agent_state=self.agent_state,
            admission=self.admission,
            pods=pods,
            pod_ends=pod_ends,
            meter=self.metrics,
            new_id=_new_id,
        )
        self.agent = self._make_agent()
        self.other_plugins = OtherDevicePlugins(settings.kubelet.device_plugin_dir)
        self._take_over = self._make_take_over(done=TAKEN_OVER in loaded.notes)
        self.dra = self._make_dra(driver, server, lost=loaded.lost) if driver is not None else None
        self.former_mode_dra = self._make_former_mode_dra(server) if driver is None and server is not None else None
        self.link: KubeletLink | DraSide = self.dra or self._make_link()
        self._registrations: defaultdict[str, int] = defaultdict(int)
        self.hardware_events = self._make_hardware_events()
        self.monitor = self._make_monitor()
        self.maintenance = self._make_maintenance()
        self.read_model = ReadModel(
            self,
            pods=pods,
            maintenance=self.maintenance,
            api_queue=api_side.api_queue,
            connections=lambda: (self.web.connections, self.web.connections_refused, self.web.disconnects),
        )
        application = partial(make_app, self.read_model, names=(settings.node.name,))
        self.web = PageServer(application, settings.http, unix_socket=settings.http.socket)
        self.display = self._make_display() if settings.display.enabled else None

    def apply(self, settings: Settings) -> None:
        """`settings` may differ only in live keys (gpumgr/settings/live.py)."""
        self.settings = settings
        set_level(settings.log.level)
        self.api_side.apply(settings.kubernetes)
        self.agent_state.apply(policy=settings.placement.policy)
        if self.dra is not None:
            self.dra.apply(settings)
        self.memory_watcher.apply(settings.enforcement)
        self.monitor.apply(rules=_health_rules(settings), sample_period_seconds=settings.nvml.sample_period_seconds)
        self.metrics.apply(settings.metrics)

    async def close(self) -> None:
        if self.display is not None:
            await self.display.stop()
        await self.web.stop()
        self.device_lists.close()
        self.pod_resources.close()
        await self.memory_watcher.close()
        await self.enforcement.close()

    # -- construction ------------------------------------------------------------------------------------------------------

    def _make_metrics(self) -> Metrics:
        settings = self.settings
        return Metrics(
            node=settings.node.name,
            version=__version__,
            driver=DRA_DRIVER if settings.node.mode == "dra" else None,
            resources={kind: profile.resource_names(settings)[kind] for kind in profile.offered(settings)},
            pods=self._pods.all,
            names=settings.metrics,
        )

    def _make_agent_state(self, loaded: Loaded) -> AgentState:
        return AgentState(
            loaded.ledger,
            checkpoint=self._checkpoint,
            device_lists=self.device_lists,
            runs=self._processes.runs,
            clock=time.monotonic,
            on_freed=self._freed,
            before_offer=lambda: self._take_over.before_offer(),
            inventory=Inventory(
                replicas=profile.replicas(self.settings),
                scaling=(self.settings.hami.device_memory_scaling, self.settings.hami.device_core_scaling),
                mig_strategy=self.settings.node.mig_strategy,
                mig_on_demand=profile.mig_on_demand(self.settings),
                policy=self.settings.placement.policy,
            ),
        )

    def _make_memory_watcher(self) -> MemoryLimitWatcher:
        owners = ProcessOwners(self.enforcement.containers, clock=time.monotonic, timeout_seconds=TIMEOUT_SECONDS)
        return MemoryLimitWatcher(
            agent_state=self.agent_state,
            pods=self._pods,
            owners=owners,
            backends=self.enforcement.limits,
            evictor=self.api_side.publisher,
            meter=self.metrics,
            settings=self.settings.enforcement,
            suspending=self.enforcement.suspend_parts(lambda: self.monitor.sampling_soon()),
        )

    def _make_agent(self) -> Agent:
        return Agent(
            agent_state=self.agent_state,
            admission=self.admission,
            reconciler=self.reconciler,
            starts=ContainerStarts(
                agent_state=self.agent_state,
                pods=self._pods,
                enforcement=self.enforcement.limits,
                host=_host_paths(self.settings, self._hardware.proc_root, lambda: self.enforcement.driver_files.access),
                make_dir=partial(os.makedirs, mode=0o755, exist_ok=True),
                make_room=self._make_room,
                stored_nodes=partial(stored_nodes, self.settings.kubelet.device_plugin_dir),
            ),
            new_id=_new_id,
            mig_driver=self.nvml,
            share_mode=lambda: self.settings.placement.share_mode,
        )

    async def _make_room(self, allocation: Allocation) -> None:
        """Ends other containers' bursts (memory beyond the request) before a container starts. While the start waits for this, the driver
        is sampled each second, because nvml.sample_period_seconds may be an hour."""
        with self.monitor.sampling_soon():
            await self.memory_watcher.bursts.make_room(allocation)

    def _make_take_over(self, *, done: bool) -> TakeOver:
        return TakeOver(
            self.settings,
            agent_state=self.agent_state,
            reconciler=self.reconciler,
            admission=self.admission,
            pods=self._pods,
            remember=None if done else partial(self._checkpoint.save_note, TAKEN_OVER, "yes"),
            wait_synced=partial(self.api_side.wait_synced, SPECS_SECONDS),
        )

    def _make_link(self) -> KubeletLink:
        offers_nvidia_names = "replica" in self.resource_lists.lists or profile.mig_resource(self.settings) is not None

        async def held_back_by() -> str | None:
            """Why not to register yet: the claims of a lost ledger are not adopted, another device plugin has the same resource names, the
            GPUs of gpu-manager's pods are unknown, or claims hold GPUs."""
            adopting = await self.former_mode_dra.held_back_by() if self.former_mode_dra is not None else None
            return (
                adopting
                or await self.other_plugins.with_same_names(nvidia=offers_nvidia_names)
                or await self._take_over.held_back_by()
                or holders_of_other_mode(self.agent_state.ledger, "plugin")
            )

        return KubeletLink(
            self.settings.kubelet.device_plugin_dir,
            self.agent,
            self.resource_lists.lists,
            on_state=self._link_changed,
            observe=self.metrics.called,
            held_back_by=held_back_by,
            names=profile.resource_names(self.settings),
        )

    def _make_former_mode_dra(self, server: ApiServer) -> "DraSide | None":
        """In mode plugin: serves claims that may remain from mode dra, or after a loss of the ledger."""
        if not (self.loaded.lost or self.loaded.ledger.claims or profile.had_mode_dra(self.settings)):
            return None
        from gpumgr.kubelet.dra_registration import DraDriver  # few nodes need it

        return self._make_dra(DraDriver(self.settings), server, lost=self.loaded.lost)

    def _make_dra(self, driver: "DraDriver", server: ApiServer | None, *, lost: bool) -> "DraSide":
        if server is None:
            raise SettingsError("node.mode dra needs the API server: set kubernetes.enabled to true, or node.mode to plugin")
        from gpumgr.kubelet.dra_side import ClaimParts, DraSide  # few nodes need it

        return DraSide(
            self.settings,
            driver,
            server,
            ClaimParts(
                agent_state=self.agent_state,
                starts=self.agent.container_starts,
                pods=self._pods,
                enforcement=self.enforcement.limits,
                pod_resources=self.pod_resources,
            ),
            lost=lost,
            observe=lambda rpc, outcome, seconds: self.metrics.called(rpc, DRA_DRIVER, outcome, seconds),
            on_state=self._driver_changed,
        )

    def _make_hardware_events(self) -> HardwareEvents:
        return HardwareEvents(
            self.agent_state,
            self._processes,
            device_root=str(self.settings.container.device_root),
            simulated=self._hardware.simulated,
            before_snapshot=self.enforcement.choose,
            on_sample=self._evaluate,
            own_pids=self.enforcement.limits.own_pids,
        )

    def _make_monitor(self) -> Monitor:
        return Monitor(
            self.nvml,
            self.hardware_events,
            rules=_health_rules(self.settings),
            sample_period_seconds=self.settings.nvml.sample_period_seconds,
            load_kernel_modules=load_modules if self.settings.nvml.load_kernel_modules else None,
            meter=self.metrics,
            process_utilization=lambda: self.enforcement.recovered and self.memory_watcher.needs_process_utilization(),
        )

    def _make_maintenance(self) -> Maintenance:
        async def reset(uuid: str) -> str:
            return await reset_gpu(self.monitor, uuid, program=self.settings.nvml.smi_program)

        def still_used_by(uuid: str) -> str | None:
            daemons = self.enforcement.mps.daemons()
            pid = next((daemon.pid for daemon in daemons if daemon.uuid == uuid), None)
            if pid is None:
                return None
            seconds = self.settings.mps.idle_seconds
            return (
                f"the MPS daemon of this GPU (pid {pid}) still runs; it ends {seconds:g} s (mps.idle_seconds) after the last container "
                "that uses it"
            )

        return Maintenance(
            agent_state=self.agent_state,
            health=self.monitor,
            pods=self._pods,
            evictor=self.api_side.publisher,
            reset=reset,
            gone_gpus=self.gone_gpus,
            still_used_by=still_used_by,
            usage=lambda: (self.memory_watcher.use, self.memory_watcher.over),
        )

    def _make_display(self) -> DisplayServer:
        graph, usage = (lambda: graph_text(self.read_model.view())), self.read_model.usage
        return DisplayServer(self.settings.display.socket, graph=graph, usage=usage, version=__version__)

    # -- callbacks ---------------------------------------------------------------------------------------------------------

    def _publish(self, node_devices: NodeDevices) -> None:
        if not isinstance(self.link, KubeletLink):
            self.link.update()
            return
        self.resource_lists.publish(self.agent_state.ledger.gpu_registry, node_devices, self.link)

    def _freed(self, allocation: AllocationId) -> None:
        with contextlib.suppress(OSError):  # the host folder of the container's /etc/vcuda may have files
            os.rmdir(self.settings.container.allocation_dir / allocation)
        self.enforcement.freed()

    async def _evaluate(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        """Looks for GPUs that are gone. Evaluates the sample only after the backends have recovered their containers."""
        await self.gone_gpus.look()
        if self.enforcement.recovered:
            await self.memory_watcher.evaluate(sample, started)

    def _link_changed(self, kind: str, state: LinkState) -> None:
        self.metrics.linked(kind, registered=state.registered, registrations=state.registrations)
        if state.registrations > max(self._registrations[kind], 1):  # not the first: the kubelet has probably restarted
            self.reconciler.kubelet_restarted()
        self._registrations[kind] = state.registrations

    def _driver_changed(self, state: LinkState) -> None:
        self.metrics.linked(DRA_DRIVER, registered=state.registered, registrations=state.registrations)


def _new_id() -> str:
    return secrets.token_hex(8)


def _health_rules(settings: Settings) -> HealthRules:
    return HealthRules(ignored_xids=frozenset(settings.nvml.ignored_xids))


def _host_paths(settings: Settings, proc_root: Path, driver_access: Callable[[], DriverAccess]) -> HostPaths:
    container = settings.container
    return HostPaths(
        exists=os.path.exists,
        device_root=str(container.device_root),
        share_driver_dir=str(container.driver_share_dir),
        whole_driver_dir=str(container.driver_whole_dir),
        allocation_dir=str(container.allocation_dir),
        machine=platform.machine(),
        extra_devices=tuple(map(str, container.extra_devices)),
        driver_access=driver_access,
        mig_minors=partial(_text_of, proc_root / "driver/nvidia-caps/mig-minors"),
    )


def _text_of(path: Path) -> str:
    """Empty if the file can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
