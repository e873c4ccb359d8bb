"""The backends "mps", and "mps-open" for containers that the operator exempted from limits on a node with MPS."""

import asyncio
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import MpsError, Refusal
from gpumgr.common.units import Process, Resource
from gpumgr.common.unix_socket import MAX_PATH_BYTES
from gpumgr.enforcement.backend import Backend, BackendName, ReportUnlimited, Unlimited
from gpumgr.enforcement.mps import launcher, processes
from gpumgr.enforcement.mps.commands import ControlFeatures, MpsProtocol, choose_protocol
from gpumgr.enforcement.mps.compute_mode import ComputeModes
from gpumgr.enforcement.mps.control import ControlProgram, DaemonConfig, find_control_program
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.findings import Observer
from gpumgr.enforcement.mps.folders import (
    DaemonRecords,
    GpuFolder,
    Share,
    gpu_folders,
    read_protocol,
    socket_path_bytes,
    write_protocol,
)
from gpumgr.enforcement.mps.supervisor import Supervisor
from gpumgr.ledger.answer import ContainerResponse, Mount
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu, Strength
from gpumgr.ledger.ledger import AllocationId
from gpumgr.settings.schema import MpsSettings

#: The memory limit on a GPU of unknown size.
_ALL_MEMORY_BYTES: Final = 1 << 40

log = structlog.get_logger(__name__)


class Mps(Backend):
    """`state_dir`: on a disk. `run_dir`: on a tmpfs. `method`: how daemons are started. `cuda_library`: libcuda's name or path, for trials
    of new clients."""

    name: BackendName = "mps"
    running_keep_limits = True
    limits: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}

    #: The time limit of one run of the control program.
    timeout_seconds = 5.0

    def __init__(
        self,
        settings: MpsSettings,
        *,
        run_dir: Path,
        state_dir: Path,
        modes: ComputeModes,
        clock: Callable[[], float],
        method: launcher.LaunchMethod,
        cuda_library: str = "libcuda.so.1",
    ) -> None:
        self._settings, self._root, self._state_dir = settings, run_dir / "mps", state_dir
        self._modes, self._clock, self._method = modes, clock, method
        self._cuda_library = cuda_library
        self._keep = True
        self._supervisor: Supervisor | None = None
        self._observer = Observer()
        #: Process of the last sample -> whether it is a daemon's server.
        self._servers: dict[Process, bool] = {}
        #: Container -> the highest memory limit of its programs, if that is not the granted one.
        self._kept: dict[AllocationId, int] = {}

    # -- whether the node can use it ----------------------------------------------------------------------------------------

    async def open(self, *, keep_protocol: bool) -> None:
        """Must be called first. `keep_protocol`: the ledger has allocations of this backend, so the protocol on record stays."""
        self._keep = keep_protocol
        try:
            await self.check_node()
        except (MpsError, OSError) as error:
            log.debug("mps_unavailable", reason=str(error))  # an obstacle only if the settings choose MPS

    async def check_node(self) -> None:
        try:
            if (excess := socket_path_bytes(self._root) - MAX_PATH_BYTES) > 0:
                raise MpsError(
                    f"paths of MPS sockets below {self._root} are {excess} bytes too long; choose a shorter enforcement.run_dir"
                )
            control = await find_control_program(
                self._settings.control_program, self._method, self._root.parent, timeout_seconds=self.timeout_seconds
            )
            await asyncio.to_thread(self._choose_protocol, control, await control.features())
        except (MpsError, OSError):
            if self._supervisor is None:
                await asyncio.to_thread(self._resume)
            raise

    def _choose_protocol(self, control: ControlProgram, features: ControlFeatures) -> None:
        """The first call decides the protocol; later calls check that the program supports it. Raises MpsError, OSError."""
        known = self._supervisor.config.protocol if self._supervisor else None
        kept = known or (read_protocol(self._state_dir) if self._keep else None)
        chosen = choose_protocol(self._settings.protocol, features, kept)
        if known is None and self._settings.protocol not in ("auto", str(chosen)):
            log.warning("mps_protocol_kept", protocol=chosen, asked=self._settings.protocol, why="containers of this node use it")
        if read_protocol(self._state_dir) != chosen:
            write_protocol(self._state_dir, chosen)
        self._configure(chosen, control, features[chosen])

    def _resume(self) -> None:
        """If an earlier agent's daemons may run, configures MPS although it is not available: the daemons' GPUs are in EXCLUSIVE_PROCESS
        mode, and problems of their containers must be reported."""
        try:
            if DaemonRecords(self._state_dir / "mps").uuids() or any(gpu_folders(self._root)):
                before = launcher.host_prefix(self._method)
                control = ControlProgram(
                    Path(self._settings.control_program), timeout_seconds=self.timeout_seconds, before=before
                )
                self._configure(read_protocol(self._state_dir) or 2, control, "")
        except OSError as error:
            log.warning("mps_daemons_not_resumed", reason=str(error))

    def _configure(self, protocol: MpsProtocol, control: ControlProgram, multiuser_option: str) -> None:
        """Raises OSError."""
        config = DaemonConfig(
            protocol=protocol,
            multiuser_option=multiuser_option,
            control=control,
            launcher=self._method,
            modes=self._modes,
            exclusive=self._settings.exclusive_process,
            clock=self._clock,
            client=(sys.executable, "-I", "-S", str(processes.CLIENT), self._cuda_library),
        )
        # Cores: protocol 2 limits each process separately, and without exclusive mode a process may use the GPU beside MPS. Protocol 3
        # limits a namespace's processes together. Memory is always "soft": in protocol 3 a process that sets
        # CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for a GPU that it can't see has no limit.
        self.limits = {"core": "hard" if protocol == 3 and self._settings.exclusive_process else "soft", "memory": "soft"}
        # In protocol 2 a program's limits are in its environment.
        self.adjustable = protocol == 3
        if self._supervisor is not None:
            self._supervisor.reconfigure(config)
            return
        self._supervisor = Supervisor(
            self._root,
            config,
            DaemonRecords(self._state_dir / "mps"),
            idle_seconds=self._settings.idle_seconds,
        )

    def _ready(self) -> Supervisor:
        """Raises Refusal."""
        if self._supervisor is None:
            raise Refusal("internal", "MPS is not available on this node; `gpumgr doctor` on the node says why")
        return self._supervisor

    # -- one container --------------------------------------------------------------------------------------------------------

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        return self.answer(tenant, kind, limited=True)

    def answer(self, tenant: GpuShare, kind: Resource, *, limited: bool) -> ContainerResponse:
        """Raises Refusal."""
        return answer(tenant, kind, self._ready().config.protocol, self._root, limited=limited)

    async def put_limits(self, tenant: GpuShare) -> None:
        await self.admit(tenant, _share(tenant.only_gpu("MPS")))

    async def admit(self, tenant: GpuShare, share: Share) -> None:
        """Raises Refusal, MpsError, OSError."""
        gpu = tenant.only_gpu("MPS")
        if not gpu.uuid.startswith("GPU-"):
            raise Refusal("internal", f"MPS can't share {gpu.uuid}: it shares whole GPUs, not MIG devices")
        daemon = self._ready().of(gpu.uuid)
        async with daemon.lock:
            await daemon.admit(tenant.allocation, share)

    def remains(self) -> Collection[AllocationId]:
        return {allocation for daemon in self.daemons() for allocation in daemon.folder.allocations()}

    async def cleanup(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        for daemon in self.daemons():
            if allocation in daemon.folder.allocations():
                async with daemon.lock:
                    try:
                        await daemon.remove(allocation)
                    except MpsError as error:  # no process uses the limits, which end with the daemon
                        log.warning("mps_limits_not_removed", allocation=allocation, gpu=daemon.uuid, reason=str(error))

    async def vacate(self, uuids: Collection[str]) -> None:
        """Ends the idle daemons of these GPUs and the mode EXCLUSIVE_PROCESS, in which only one process could use the GPU. Raises
        Refusal."""
        for daemon in self.daemons():
            if daemon.uuid in uuids:
                async with daemon.lock:
                    try:
                        await daemon.vacate()
                    except (MpsError, OSError) as error:
                        raise Refusal("internal", f"MPS still uses GPU {daemon.uuid}: {error}") from error

    # -- all containers -------------------------------------------------------------------------------------------------------

    async def recover(self, tenants: Sequence[GpuShare]) -> None:  # noqa: ARG002
        """Adopts an earlier agent's daemons, and restarts ended ones. Does not need `tenants`, because their shares are on record."""
        if self._supervisor is not None:
            await self._supervisor.tick()

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Raises OSError."""
        if self._supervisor is None or not running:
            return ()
        return await asyncio.to_thread(self._observer.observe, self._supervisor.daemons(), running)

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        obstacles: dict[AllocationId, str] = {}
        self._kept = {}
        if self._supervisor is None:
            return obstacles
        for daemon in self._supervisor.daemons() if self.adjustable and running else ():
            shares = daemon.folder.shares()
            for each in (each for each in running if each.tenant.gpus[0].uuid == daemon.uuid):
                name, known = each.tenant.allocation, shares.get(each.tenant.allocation)
                if known is not None and (why := await self._resize(daemon, known, each)):
                    obstacles[name] = why
        await self._supervisor.tick()
        return obstacles

    async def _resize(self, daemon: Daemon, known: Share, container: RunningContainer) -> str | None:
        """Why the memory limit is not in force; None: it is."""
        try:
            async with daemon.lock:
                share = _share(container.tenant.gpus[0])
                older = await daemon.resize(container.tenant.allocation, known, share, container.gpu_pids)
        except (MpsError, OSError) as error:
            return str(error)
        if not older:
            return None
        self._kept[container.tenant.allocation] = max(older.values())
        return f"its process {min(older)[0]} keeps the limit with which it started, until it ends"

    def kept_bytes(self) -> Mapping[AllocationId, int]:
        return self._kept

    async def end_clients(self, pids: Mapping[str, Collection[int]]) -> None:
        """Terminates the work of daemons' clients. `pids`: UUID of the GPU -> processes, which need not be clients."""
        await asyncio.gather(*(self._end_clients(each, pids[each.uuid]) for each in self.daemons() if each.uuid in pids))

    async def _end_clients(self, daemon: Daemon, pids: Collection[int]) -> None:
        async with daemon.lock:
            try:
                await daemon.end_clients(pids)
            except (MpsError, OSError) as error:
                log.warning("mps_clients_not_ended", gpu=daemon.uuid, reason=str(error))

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:
        return await self._supervisor.end_idle(known) if self._supervisor is not None else None

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:
        """The MPS servers of gpumgr's daemons, also of daemons that have ended. An exiting server can't be recognized, although NVML still
        lists it, so the answers for the last sample's processes are kept."""
        pipes = [each.folder.pipe for each in self.daemons()]
        known = self._servers
        self._servers = {each: known[each] if each in known else processes.is_server(each[0], pipes) for each in started.items()}
        return frozenset(pid for (pid, _), is_server in self._servers.items() if is_server)

    def daemons(self) -> Sequence[Daemon]:
        return self._supervisor.daemons() if self._supervisor else ()

    def restarts(self) -> Mapping[str, int]:
        """UUID of the GPU -> restarts of its daemon since the agent's start."""
        return {daemon.uuid: daemon.restarts for daemon in self.daemons()}

    async def close(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.close()


def _share(gpu: SharedGpu) -> Share:
    return Share(cores=gpu.core_percent, memory_bytes=gpu.memory_bytes)


def _whole(tenant: GpuShare) -> Share:
    return Share(cores=100, memory_bytes=tenant.only_gpu("MPS").total_bytes or _ALL_MEMORY_BYTES)


def answer(tenant: GpuShare, kind: Resource, protocol: MpsProtocol, root: Path, *, limited: bool) -> ContainerResponse:
    """MPS's part of the answer to Allocate. Pure. `root`: has one folder for each GPU. `limited`: False for an exempt container. Raises
    Refusal for several GPUs, since each has its own daemon, and a process uses only one.

    All clients must use the daemon's own path of the pipe folder (NVIDIA's documentation on CUDA_MPS_PIPE_DIRECTORY). The folder is mounted
    read-only, as by NVIDIA's container toolkit: sockets and pipes work, but root in a container can't make links where the daemon, which is
    root on the host, opens its files next time. In protocol 3 only the folder of the container's namespace is mounted, because the socket
    determines the limits.

    CUDA's clients and servers share memory in /dev/shm, so the containers on a GPU and its daemon get the same small tmpfs, as with
    NVIDIA's device plugin. If a pod has its own volume at /dev/shm, the volume covers this tmpfs, since the kubelet lists the pod's mounts
    last. Then the pod's clients and the server share no memory. NVIDIA's guide shows such clients for protocol 3; whether they work in
    protocol 2 is not known.

    MPS ignores the annotation vcuda-core-limit: it has no limit that is lifted while other containers are idle.
    """
    gpu = tenant.only_gpu("MPS")
    if kind == "memory":
        # The daemon's only GPU has the index 0. An entry for a GPU that is not visible would void the limit.
        limit = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={gpu.memory_bytes >> 20}M"}
        return ContainerResponse(envs=limit if limited and protocol == 2 else {})
    folder = GpuFolder(root / gpu.uuid)
    pipe = folder.pipe if protocol == 2 else folder.namespace(tenant.allocation)
    envs = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    if limited and protocol == 2:
        envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(gpu.core_percent)
    mounts = (
        Mount(container_path=str(pipe), host_path=str(pipe), read_only=True),
        Mount(container_path="/dev/shm", host_path=str(folder.shm)),
    )
    return ContainerResponse(envs=envs, mounts=mounts)


class UnlimitedMps(Unlimited):
    """Exempt containers on a GPU with MPS, where only the daemon's clients get CUDA contexts. The backend `mps` manages their daemons and
    files.

    In protocol 2 the daemon's bound for all clients is the largest share on its GPU. With an exempt container that is the whole GPU, so the
    others are limited by their environment alone.
    """

    name: BackendName = "mps-open"

    def __init__(self, mps: Mps, report: ReportUnlimited) -> None:
        super().__init__(report)
        self._mps = mps

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        return self._mps.answer(tenant, kind, limited=False)

    async def put_limits(self, tenant: GpuShare) -> None:
        await self._mps.admit(tenant, _whole(tenant))
        await super().put_limits(tenant)

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Reports only whether the daemon works: these containers have no limits to evade. Raises OSError."""
        return [finding for finding in await self._mps.observe(running) if finding.code == "broken"]
