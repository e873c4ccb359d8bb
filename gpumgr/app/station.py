"""Builds the stations of one node around one agent. Nothing runs yet; `lifecycle` starts and stops what is built here."""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumgr import __version__
from gpumgr.agent.admission import Admission
from gpumgr.agent.books import Books
from gpumgr.agent.housekeeping import Housekeeping
from gpumgr.agent.offers import Offers
from gpumgr.agent.ports import Checkpoint, Pods
from gpumgr.agent.writer import Agent, AgentView
from gpumgr.aio import Latest
from gpumgr.allocator.answer import HostPaths
from gpumgr.allocator.ledger import AllocationId, Ledger
from gpumgr.allocator.offer import Offer
from gpumgr.app.encode import encode_offer
from gpumgr.app.enforcing import Enforcing
from gpumgr.app.listener import News
from gpumgr.app.truth import OverLimit, Truth
from gpumgr.deviceplugin.podresources import PodResourcesClient
from gpumgr.deviceplugin.registration import KubeletLink, LinkState
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.metrics.live import Metrics
from gpumgr.nvml.driver import Nvml
from gpumgr.nvml.health import HealthRules
from gpumgr.nvml.monitor import Monitor
from gpumgr.proc import HostProcesses
from gpumgr.settings import Settings
from gpumgr.topology.devices import NodeSample
from gpumgr.units import KINDS, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where NVML, sysfs and proc are; a simulated node has its own, and no device nodes to look at."""

    library_path: str | None = None
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    simulated: bool = False


class Station:
    """The agent with everything around it that lives inside this process. Make it inside the event loop."""

    def __init__(
        self,
        settings: Settings,
        hardware: Hardware,
        *,
        ledger: Ledger,
        checkpoint: Checkpoint,
        pods: Pods,
        announcer: Announcer | None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics(
            node=settings.node.name,
            version=__version__,
            pods=pods.all,
            gpu_manager_names=settings.metrics.gpu_manager_names,
            hami_names=settings.metrics.hami_names,
        )
        self.devices: Mapping[Kind, Latest[bytes]] = {kind: Latest(b"") for kind in KINDS}
        self.offers = Offers(self._publish, clock=time.monotonic)
        processes = HostProcesses(hardware.proc_root)
        self.books = Books(
            ledger,
            checkpoint=checkpoint,
            offers=self.offers,
            meter=self.metrics,
            runs=processes.runs,
            policy=settings.placement.policy,
            clock=time.monotonic,
            on_freed=self._freed,
        )
        self.nvml = Nvml(
            library_path=hardware.library_path,
            timeout_seconds=settings.nvml.call_timeout_seconds,
            sysfs_root=hardware.sysfs_root,
            cgroup_root=settings.cri.cgroup_root,
        )
        self.enforcing = Enforcing(
            settings,
            nvml=self.nvml,
            processes=processes,
            proc_root=hardware.proc_root,
            pods=pods,
            announcer=announcer,
            simulated=hardware.simulated,
        )
        limits = self.enforcing.limits
        self.truth = Truth(
            books=self.books,
            pods=pods,
            runtime=self.enforcing.containers,
            backends=limits,
            announcer=announcer,
            meter=self.metrics,
            over_limit=_over_limit(settings),
        )
        self.pod_resources = PodResourcesClient(settings.kubelet.pod_resources_socket)
        self.admission = Admission(
            pods, self.pod_resources, pod_wait_seconds=settings.kubernetes.pod_wait_milliseconds / 1000, clock=time.monotonic
        )
        self.housekeeping = Housekeeping(books=self.books, admission=self.admission, pods=pods, new_id=_new_id)
        self.agent = Agent(
            books=self.books,
            admission=self.admission,
            housekeeping=self.housekeeping,
            pods=pods,
            enforcement=limits,
            host=_host_paths(settings),
            make_dir=_make_dir,
            new_id=_new_id,
            share_mode=settings.placement.share_mode,
        )
        self.link = KubeletLink(
            settings.kubelet.device_plugin_dir, self.agent, self.devices, on_state=self._linked, observe=self.metrics.called
        )
        device_root = None if hardware.simulated else str(settings.container.device_root)
        self.news = News(
            self.books,
            processes,
            device_root=device_root,
            before_snapshot=lambda snapshot: self.enforcing.choose(snapshot.driver_version),
            on_processes=self._looked,
            on_sample=self._sampled,
        )
        self.monitor = Monitor(
            self.nvml,
            self.news,
            rules=_health_rules(settings),
            sample_period_seconds=settings.nvml.sample_period_seconds,
            load_kernel_modules=settings.nvml.load_kernel_modules,
            on_xid=self.metrics.xid,
            on_batch=self.metrics.batched,
        )
        #: How often the GPUs are looked at, and what readers see is drawn anew.
        self.sample_period_seconds = Latest(settings.nvml.sample_period_seconds)
        self.sample: NodeSample | None = None
        #: In monotonic seconds.
        self.sampled_at: float | None = None
        self.nvml_up = False
        self._registrations: dict[Kind, int] = dict.fromkeys(KINDS, 0)

    def apply(self, settings: Settings) -> None:
        """Puts in force what differs from the settings of before in live keys alone (gpumgr.settings.live)."""
        self.settings = settings
        self.books.policy = settings.placement.policy
        self.agent.share_mode = settings.placement.share_mode
        self.admission.pod_wait_seconds = settings.kubernetes.pod_wait_milliseconds / 1000
        self.truth.over_limit = _over_limit(settings)
        self.monitor.rules = _health_rules(settings)
        self.monitor.sample_period_seconds = settings.nvml.sample_period_seconds
        self.sample_period_seconds.set(settings.nvml.sample_period_seconds)
        self.metrics.name_too(gpu_manager=settings.metrics.gpu_manager_names, hami=settings.metrics.hami_names)

    # -- what readers see --------------------------------------------------------------------------------------------------

    def view(self) -> AgentView:
        return self.agent.view()

    def not_alive(self) -> list[str]:
        """The loop answers, so the process is alive; a daemon that ends takes the process with it."""
        return []

    def not_ready(self) -> list[str]:
        reasons = [
            f"{kind} is not registered with the kubelet" + (f": {state.error}" if state.error else "")
            for kind, state in self.link.states.items()
            if not state.registered
        ]
        return reasons + self.no_driver()

    def no_driver(self) -> list[str]:
        if self.nvml_up:
            return []
        return ["the driver's library does not answer" if self.sampled_at else "no driver was found yet"]

    def status(self) -> str:
        """One line for `systemctl status`."""
        states = self.link.states.values()
        registered = f"registered {sum(state.registered for state in states)}/{len(states)}"
        if not self.nvml_up:
            return f"{registered}, no driver: {self.news.down_because or 'NVML has not answered yet'}"
        cards = self.books.ledger.cards.cards
        return f"{registered}, {len(cards) - len(self.view().node.unfit)} of {len(cards)} GPUs offered"

    async def close(self) -> None:
        self.offers.close()
        self.pod_resources.close()
        await self.truth.close()
        await self.enforcing.close()

    # -- news --------------------------------------------------------------------------------------------------------------

    def _publish(self, offer: Offer) -> None:
        for kind, message in encode_offer(self.books.ledger.cards, offer).items():
            self.devices[kind].set(message)
            self.metrics.listed(kind)

    def _freed(self, allocation: AllocationId) -> None:
        self._remove_folder(allocation)
        self.enforcing.freed()

    def _remove_folder(self, allocation: AllocationId) -> None:
        """What a freed allocation's container saw at /etc/vcuda; only if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.settings.container.allocation_dir / allocation)

    def remove_orphans(self) -> None:
        """Folders that an earlier life of the agent left behind."""
        known = self.books.ledger.allocations
        with contextlib.suppress(OSError):
            for folder in os.listdir(self.settings.container.allocation_dir):
                if re.fullmatch("[0-9a-f]{16}", folder) and folder not in known:
                    self._remove_folder(folder)

    async def _looked(self, sample: NodeSample, started: Mapping[int, int]) -> None:
        if not self.enforcing.recovered:
            return  # the mechanisms don't know their tenants yet, nor their own processes
        await self.truth.sampled(sample, started)
        self.monitor.watch_processes = self.truth.wanted()

    def _sampled(self, sample: NodeSample | None) -> None:
        self.nvml_up = sample is not None
        if sample is not None:
            self.sample, self.sampled_at = sample, time.monotonic()

    def _linked(self, kind: Kind, state: LinkState) -> None:
        self.metrics.linked(kind, state)
        if state.registrations > max(self._registrations[kind], 1):
            self.housekeeping.kubelet_restarted()
        self._registrations[kind] = state.registrations


def _new_id() -> str:
    return secrets.token_hex(8)


def _make_dir(path: str) -> None:
    os.makedirs(path, mode=0o755, exist_ok=True)


def _over_limit(settings: Settings) -> OverLimit:
    rule = settings.enforcement
    return OverLimit(samples=rule.over_limit_samples, slack_bytes=rule.over_limit_slack_mebibytes << 20, evict=rule.evict)


def _health_rules(settings: Settings) -> HealthRules:
    return HealthRules(ignored_xids=frozenset(settings.nvml.ignored_xids))


def _host_paths(settings: Settings) -> HostPaths:
    container = settings.container
    return HostPaths(
        exists=os.path.exists,
        device_root=str(container.device_root),
        share_driver_dir=str(container.driver_share_dir),
        whole_driver_dir=str(container.driver_whole_dir),
        allocation_dir=str(container.allocation_dir),
        extra_devices=tuple(map(str, container.extra_devices)),
    )
