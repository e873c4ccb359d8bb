"""Builds the enforcement backends and connects them to the driver, the container runtime and the driver's files."""

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gpumgr.agent.container_starts import others_on_gpus, tenants
from gpumgr.agent.inventory import EMPTY
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import wait_at_most
from gpumgr.common.proc import HostProcesses, environment
from gpumgr.compat.gpu_manager.driver_files.node_files import RUNTIME_SECONDS, NodeDriverFiles
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.driver import Hardware
from gpumgr.driver.driver import Nvml
from gpumgr.enforcement.backend import Backend, Mechanisms, Unlimited, not_enforced, unlimited_message
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.limiter.backend import Limiter
from gpumgr.enforcement.limiter.context_sizes import ContextSizes
from gpumgr.enforcement.mps.backend import Mps, UnlimitedMps
from gpumgr.enforcement.mps.launcher import best_method
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.gpu_share import GpuShare, gpu_limits
from gpumgr.ledger.node_use import Container
from gpumgr.placement.devices import NodeSnapshot
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.cri import CriClient
from gpumgr.runtime.suspend_parts import Parts, memory_left, move
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library

log = structlog.get_logger(__name__)

#: The longest pause between two searches for leftovers of ended containers.
CLEAN_UP_SECONDS = 30.0
MIN_CLEAN_UP_SECONDS = 0.5
#: The interval at which backends are checked for obstacles: reasons why a backend can't be used now.
CHOICE_SECONDS = 60.0
#: The interval at which unused copies of the driver's files are removed.
PRUNE_SECONDS = 3600.0
NODE_ANNOTATION = "gpumgr.io/enforcement"


def make_nvml(settings: Settings, hardware: Hardware) -> Nvml:
    """The driver; its session is not open yet."""
    return Nvml(
        library_path=hardware.library_path,
        timeout_seconds=settings.nvml.call_timeout_seconds,
        sysfs_root=hardware.sysfs_root,
        cgroup_root=settings.cri.cgroup_root,
        unreported_memory_bytes=settings.nvml.unreported_memory_bytes,
    )


class NodeEnforcement:
    """The enforcement of this node. `publisher` is None without an API server. The caller closes the driver's session `nvml`.

    Order of calls: `preload`, in a second agent that waits; `open`; `choose` for each snapshot of the GPUs, before they are offered;
    `recover` after reconciliation with the kubelet; `run` as a daemon; `close`.

    `gpumgr doctor` passes `trial`, a folder and a driver session, and calls only `backends` and `close`. The backends then write only into
    this folder and start no daemon.
    """

    def __init__(
        self,
        settings: Settings,
        hardware: Hardware,
        pods: Pods,
        publisher: Publisher | None,
        trial: tuple[Path, Nvml] | None = None,
    ) -> None:
        self._settings, self._pods, self._publisher = settings, pods, publisher
        state_dir, self._library_dir = settings.checkpoint.dir, settings.checkpoint.library_dir
        if trial is not None:
            state_dir = self._library_dir = trial[0]
        self._proc_root, simulated = hardware.proc_root, hardware.simulated
        self._processes = HostProcesses(hardware.proc_root)
        nvml = make_nvml(settings, hardware) if trial is None else trial[1]
        self.runtime = CriClient(settings.cri.socket)
        self._cgroups = Cgroups(settings.cri.cgroup_root, hardware.proc_root)
        self.containers = Containers(self.runtime, self._cgroups, self._processes.runs)
        self.driver_files = NodeDriverFiles(settings, self.runtime.runtimes, simulated=simulated)
        chosen, nvml_library = settings.enforcement, settings.nvml.library_path
        #: libcuda in NVML's folder; if NVML's path is not set, the name by which the dynamic linker finds it.
        self._libcuda = "libcuda.so.1" if nvml_library is None else str(nvml_library.with_name("libcuda.so.1"))
        self.mps = Mps(
            settings.mps,
            run_dir=chosen.run_dir,
            state_dir=state_dir,
            modes=nvml,
            clock=time.monotonic,
            method=best_method(in_pod="KUBERNETES_SERVICE_HOST" in os.environ),
            cuda_library=self._libcuda,
        )
        self.vcuda = self._make_vcuda(self.driver_files.vcuda_obstacle if trial is None else lambda: None)
        self._volumes = BoundedFolders()
        self._hami_core = HamiCore(
            library_path=None,
            library_sha256=None,
            library_dir=self._library_dir,
            run_dir=chosen.run_dir,
            pid_in_container_of=self._cgroups.pid_in_container_of,
            volumes=self._volumes,
            log_level=settings.hami_core.log_level,
        )
        self._limiter = self._make_limiter(nvml)
        self._memory = DriverMemory(
            nvml, cgroup_root=settings.cri.cgroup_root, runtime_obstacle=lambda: self.containers.unavailable
        )
        unlimited = (UnlimitedMps(self.mps, self._not_enforced), Unlimited(self._not_enforced))
        self.limits = Enforcer(
            [self._memory, self._limiter, self._hami_core, self.vcuda, self.mps, *unlimited],
            msgspec.structs.replace(chosen, backend="none") if simulated and chosen.backend == "auto" else chosen,
            on_start=self._on_start,
            others_on_gpus=lambda tenant: others_on_gpus(self.agent_state.ledger, tenant),
            clock=time.monotonic,
        )
        self._snapshot = EMPTY
        self._agent_state: AgentState | None = None
        self.recovered = False
        self._freed = asyncio.Event()
        self.nvml: Final = nvml

    def _make_limiter(self, nvml: Nvml) -> Limiter:
        return Limiter(
            library_dir=self._library_dir,
            run_dir=self._settings.enforcement.run_dir,
            pid_in_container_of=self._cgroups.pid_in_container_of,
            quantum_milliseconds=self._settings.limiter.quantum_milliseconds,
            contexts=ContextSizes(nvml.processes, library=self._libcuda),
            volumes=self._volumes,
        )

    def suspend_parts(self, sampling_soon: Callable[[], contextlib.AbstractContextManager[None]]) -> Parts:
        lock_file, root = self._settings.enforcement.run_dir / "suspend.lock", self._proc_root
        return Parts(
            machine=platform.machine(),
            start_times=self._processes.start_times,
            runs=self._processes.runs,
            memory_left=partial(memory_left, root, self._cgroups),
            move=partial(move, library=self._libcuda, proc_root=root, lock_file=lock_file),
            pages=self._limiter,
            sampling_soon=sampling_soon,
        )

    def _make_vcuda(self, driver_files_obstacle: Callable[[], str | None]) -> VcudaBackend:
        return VcudaBackend(
            allocation_dir=self._settings.container.allocation_dir,
            library_path=self._settings.vcuda.library_path,
            library_sha256=self._settings.vcuda.library_sha256,
            container_of=self._container_of,
            pids_of=self.containers.pids,
            driver_files_obstacle=driver_files_obstacle,
            environment_of=partial(environment, root=self._proc_root),
        )

    def backends(self) -> Mapping[str, Backend]:
        """The backends by name. A HAMi-core library that is installed later is used without a restart."""
        self._hami_core.supply(*hami_core_library(self._settings))
        return self.limits.backends

    async def preload(self) -> None:
        """Fills the caches that `choose` needs. Changes nothing on the node."""
        await self.containers.refresh()
        await self.backends()["hami-core"].unavailable()

    async def open(self, agent_state: AgentState, *, lost: bool) -> None:
        """The stored MPS protocol is kept if a container of the ledger uses MPS, or may use it because the ledger is `lost`."""
        self._agent_state = agent_state
        keep = any({"mps", "mps-open"} & set(a.mechanisms) for a in agent_state.ledger.allocations.values())
        await self.mps.open(keep_protocol=keep or lost)

    async def choose(self, snapshot: NodeSnapshot) -> None:
        """Call it when the driver has listed GPUs, at the start or after a change."""
        self._snapshot = snapshot
        self._memory.driver_restarted()
        await self.driver_files.update(snapshot.driver_version)
        await self._choose()

    async def _choose(self) -> None:
        # Some backends need the container runtime, so its answer is awaited first.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RUNTIME_SECONDS):
                await self.containers.refresh()
        self.backends()
        await self.limits.choose(self._snapshot.gpus)
        if self._publisher is not None:
            self._publisher.annotate(NODE_ANNOTATION, self.limits.described)

    async def recover(self) -> None:
        """Takes over the running containers after a restart of the agent."""
        await self.limits.recover(list(tenants(self.agent_state.ledger, self.agent_state.inventory, self._pods)))
        self.recovered = True

    def freed(self) -> None:
        """Schedules the removal of a freed allocation's files."""
        self._freed.set()

    async def run(self) -> None:
        next_prune = next_choice = time.monotonic()
        wait = 0.0
        while True:
            await wait_at_most(self._freed, wait)
            self._freed.clear()
            due = await self.limits.tend(lambda: self.agent_state.ledger.allocations.keys())
            wait = CLEAN_UP_SECONDS if due is None else min(max(due, MIN_CLEAN_UP_SECONDS), CLEAN_UP_SECONDS)
            now = time.monotonic()
            if now >= next_choice and self._snapshot.driver_version is not None:
                next_choice = now + CHOICE_SECONDS
                await self.driver_files.update(self._snapshot.driver_version)
                await self._choose()
            if now >= next_prune:
                next_prune = now + PRUNE_SECONDS
                await self.driver_files.prune()

    @property
    def agent_state(self) -> AgentState:
        if self._agent_state is None:
            raise RuntimeError("open() was not called")
        return self._agent_state

    async def close(self) -> None:
        await self.limits.close()
        self.runtime.close()

    # -- callbacks of the backends -----------------------------------------------------------------------------------------

    async def _container_of(self, pid: int) -> Container | None:
        started = self._processes.start_time(pid)
        return None if started is None else await self.containers.container_of(pid, started)

    def _on_start(self, tenant: GpuShare | None, mechanisms: Mechanisms) -> None:
        """Called before a container starts: reports the container if its mechanism can't limit one of its GPUs. `tenant` None: it has no
        share."""
        self.containers.wake()
        shares = {gpu.uuid for gpu in tenant.gpus if not gpu.whole} if tenant is not None else set()
        for gpu in self._snapshot.gpus:
            limits = gpu_limits(gpu, mechanisms, self.limits.choice.strengths, ())
            if tenant and gpu.uuid in shares and limits.cores_by and (limits.cores, limits.memory) == ("none", "none"):
                self._not_enforced(tenant, unlimited_message(tenant, f"{limits.cores_by} can't limit GPU {gpu.model}"))

    def _not_enforced(self, tenant: GpuShare, message: str) -> None:
        """Adds to the history that a container runs without limits: once, even if the container restarts."""
        view = find_pod(self._pods, tenant.pod, tenant.pod_uid)
        log.info("not_enforced", allocation=tenant.allocation, holder=tenant.describe())
        uid = tenant.pod_uid or (view.uid if view else None)
        self.agent_state.history.add_unless_repeated(not_enforced(tenant, uid, message))
