"""Joins the mechanisms of limits with the settings, the driver, the container runtime and the driver's files."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from gpumgr.agent.books import Books
from gpumgr.agent.ports import Pods
from gpumgr.agent.tenants import tenant_of, view_of
from gpumgr.allocator.history import Entry
from gpumgr.allocator.tenant import Tenant
from gpumgr.cri.cgroups import Cgroups
from gpumgr.cri.client import CriClient
from gpumgr.cri.containers import Containers
from gpumgr.driverfiles.errors import DriverFilesError
from gpumgr.driverfiles.manager import DriverMirror
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.limits import Limits
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.exempt import MpsOpen
from gpumgr.enforcement.nothing import Nothing
from gpumgr.enforcement.vcuda.backend import VcudaBackend
from gpumgr.enforcement.vcuda.client import build_client
from gpumgr.errors import InputError
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.kubeapi.writer.telling import NOT_ENFORCED
from gpumgr.nvml.driver import Nvml
from gpumgr.proc import HostProcesses
from gpumgr.settings import Settings
from gpumgr.usage.containers import Container

log = structlog.get_logger(__name__)

#: How often to look for what is left over, if nothing calls for it earlier.
TEND_SECONDS = 30.0
LEAST_SECONDS = 0.5
#: How often to ask again what stands in the way of a mechanism.
CHOICE_SECONDS = 60.0
RUNTIME_SECONDS = 0.5
PRUNE_SECONDS = 3600.0
NODE_ANNOTATION = "gpumgr.io/enforcement"


class Enforcing:
    """All that keeps shares apart on this node. `announcer` None: there is no API server to tell.

    Order: `open`; `choose` for each picture of the node's GPUs, before they are offered; `recover` once the ledger is in order;
    then `run` as a daemon; `close`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        nvml: Nvml,
        processes: HostProcesses,
        proc_root: Path,
        pods: Pods,
        announcer: Announcer | None,
        simulated: bool,
    ) -> None:
        self._settings, self._processes, self._pods, self._announcer = settings, processes, pods, announcer
        self._client = CriClient(settings.cri.socket)
        self._cgroups = Cgroups(settings.cri.cgroup_root, proc_root)
        self.containers = Containers(self._client, self._cgroups, processes.runs)
        chosen, state_dir = settings.enforcement, settings.checkpoint.dir
        self.mps = Mps(
            limits=("core", "memory"),
            program=settings.mps.control_program,
            setting=settings.mps.protocol,
            run_dir=chosen.run_dir,
            state_dir=state_dir,
            modes=nvml,
            exclusive_process=settings.mps.exclusive_process,
            idle_seconds=settings.mps.idle_seconds,
            clock=time.monotonic,
            in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
        )
        self.vcuda = VcudaBackend(
            allocation_dir=settings.container.allocation_dir,
            library_path=settings.vcuda.library_path,
            library_sha256=settings.vcuda.library_sha256,
            container_of=self._container_of,
            pids_of=self.containers.pids,
            driver_files_obstacle=self._files_obstacle,
        )
        self.limits = Limits(
            self._backends(nvml),
            # GPUs that are not there are limited by nothing of this host, unless somebody asks for it by name.
            setting="none" if simulated and chosen.backend == "auto" else chosen.backend,
            overrides=chosen.overrides,
            cdi_dir=chosen.cdi_dir,
            inject_by_cdi=chosen.injection == "cdi",
            orphan_grace_seconds=chosen.orphan_grace_seconds,
            on_start=self.containers.wake,
            neighbours=self._neighbours,
            clock=time.monotonic,
        )
        self._mirror: DriverMirror | None = None
        self._mirrored: str | None = None
        self._mirror_error: str | None = None
        self._driver_version: str | None = None
        self._annotated: str | None = None
        self._books: Books | None = None
        self.recovered = False
        self._freed = asyncio.Event()

    def _backends(self, nvml: Nvml) -> list[Backend]:
        hami_core = HamiCore(
            library_path=self._settings.hami_core.library_path,
            library_sha256=self._settings.hami_core.library_sha256,
            library_dir=self._settings.checkpoint.dir / "lib",
            run_dir=self._settings.enforcement.run_dir,
            nspid_of=self._cgroups.nspid_of,
        )
        memory = DriverMemory(
            nvml, cgroup_root=self._settings.cri.cgroup_root, runtime_obstacle=lambda: self.containers.unavailable
        )
        unlimited = (MpsOpen(self.mps, self._not_enforced), Nothing(self._not_enforced))
        return [memory, hami_core, self.vcuda, self.mps, *unlimited]

    def told(self) -> tuple[tuple[str, str], ...]:
        """(mechanism, what it keeps): what shares of this node get unless the operator said otherwise."""
        return tuple(
            (name, f"{kept} of each process" if name == "mps" and self.mps.limits_processes else kept)
            for name, kept in self.limits.told()
        )

    async def open(self, books: Books, *, lost: bool) -> None:
        """Before the driver is asked for anything. `lost`: the ledger is, so nobody knows yet who was answered what."""
        self._books = books
        keep = any({"mps", "mps-open"} & set(a.mechanisms) for a in books.ledger.allocations.values())
        await self.mps.open(keep_protocol=keep or lost)

    async def choose(self, driver_version: str | None) -> None:
        """The driver shows GPUs, for the first time or again: what can this node carry now?"""
        self._driver_version = driver_version
        await self._mirror_driver()
        await self._choose()

    async def _choose(self) -> None:
        with contextlib.suppress(TimeoutError):  # a mechanism asks whether the runtime answers
            async with asyncio.timeout(RUNTIME_SECONDS):
                await self.containers.refresh()
        await self.limits.choose()
        if self._announcer is not None and (told := self.limits.describe()) != self._annotated:
            self._announcer.annotate_node(NODE_ANNOTATION, told)
            self._annotated = told

    async def recover(self) -> None:
        """Takes over what an earlier life of the agent left for the containers that live."""
        await self.limits.recover(list(self._tenants()))
        self.recovered = True

    def freed(self) -> None:
        """An allocation is gone: what is kept for it will be due."""
        self._freed.set()

    async def run(self) -> None:
        """Removes what is left over, and asks again for what stands in a mechanism's way; for ever."""
        next_prune = next_choice = time.monotonic()
        wait = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._freed.wait()
            self._freed.clear()
            due = await self.limits.tend(lambda: self.books.ledger.allocations.keys())
            wait = TEND_SECONDS if due is None else min(max(due, LEAST_SECONDS), TEND_SECONDS)
            now = time.monotonic()
            if now >= next_choice and self._driver_version is not None:
                next_choice = now + CHOICE_SECONDS
                await self._mirror_driver()
                await self._choose()
            if now >= next_prune and self._mirror is not None:
                next_prune = now + PRUNE_SECONDS
                await self._prune(self._mirror)

    @property
    def books(self) -> Books:
        if self._books is None:
            raise RuntimeError("open() comes first")
        return self._books

    async def close(self) -> None:
        await self.limits.close()
        self._client.close()

    # -- the driver's files ------------------------------------------------------------------------------------------------

    async def _mirror_driver(self) -> None:
        """What containers get at /usr/local/nvidia, if it is ours to make: for the vcuda library."""
        library, version = self._settings.vcuda.library_path, self._driver_version
        if library is None or version is None or version == self._mirrored:
            return
        try:
            if self._mirror is None:
                self._mirror = DriverMirror(
                    volume_conf=self._settings.vcuda.volume_conf,
                    shim=library,
                    shim_sha256=self._settings.vcuda.library_sha256,
                    client=await self._gpu_client(),
                    roots=self._settings.vcuda.driver_roots,
                    share_dir=self._settings.container.driver_share_dir,
                    whole_dir=self._settings.container.driver_whole_dir,
                )
            files = await self._mirror.ensure(version)
        except (DriverFilesError, InputError, OSError) as error:
            self._not_mirrored(str(error))
            return
        if files.share_error is not None:
            self._not_mirrored(files.share_error)
            return
        self._mirrored, self._mirror_error = version, None
        for problem in files.problems:
            log.warning("driver_files_incomplete", problem=problem)

    def _not_mirrored(self, error: str) -> None:
        """It is tried again with the next choice."""
        if error != self._mirror_error:
            log.error("driver_files_not_mirrored", error=error, consequence="the backend vcuda can't be used")
        self._mirror_error = error

    def _files_obstacle(self) -> str | None:
        """Why vcuda's library would not stand before the driver's in a container."""
        if self._mirrored is not None:
            return None
        return self._mirror_error or "the driver's files are not mirrored yet"

    async def _prune(self, mirror: DriverMirror) -> None:
        try:
            await mirror.prune()
        except (DriverFilesError, OSError) as error:
            log.warning("driver_files_not_removed", error=str(error))

    async def _gpu_client(self) -> Path:
        given = self._settings.vcuda.client_path
        return given if given is not None else await asyncio.to_thread(build_client, self._settings.checkpoint.dir / "lib")

    # -- what the mechanisms ask and say -----------------------------------------------------------------------------------

    async def _container_of(self, pid: int) -> Container | None:
        started = self._processes.start_time(pid)
        return None if started is None else await self.containers.of_process(pid, started)

    def _not_enforced(self, tenant: Tenant, message: str) -> None:
        """The container runs without limits: the history says so, and to its owner the event of its placement did. Of a repeated start
        nothing is said."""
        view = self._pods.get(tenant.pod) if tenant.pod else None
        uid = tenant.pod_uid or (view.uid if view else None)
        log.info("not_enforced", allocation=tenant.allocation, holder=tenant.describe())
        history = self.books.history
        history.add_news(
            Entry(
                at=history.now(),
                what="event",
                id=tenant.allocation,
                pod=tenant.pod,
                pod_uid=uid,
                container=tenant.container,
                gpus=(tenant.gpu,),
                why=message,
                code=NOT_ENFORCED,
            )
        )

    def _tenants(self) -> Iterator[tuple[Tenant, tuple[str, ...]]]:
        ledger = self.books.ledger
        gpus = self.books.inventory.gpus(ledger.cards)
        for allocation in ledger.allocations.values():
            tenant = tenant_of(allocation, ledger.cards, gpus, view_of(allocation, self._pods))
            if tenant is not None:
                yield tenant, allocation.mechanisms

    def _neighbours(self, tenant: Tenant) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Other pods' shares on the tenant's GPU."""
        ledger = self.books.ledger
        own = ledger.allocations.get(tenant.allocation)
        for other in ledger.on(tenant.gpu):
            if (
                other.id != tenant.allocation
                and other.mechanisms
                and not (own and own.same_pod(other) and own.init != other.init)
            ):
                yield other.describe(), other.mechanisms
