"""Backend "mps": implements gpumgr.enforcement.backend.Backend."""

import asyncio
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.mps import findings, injection, launch, processes, protocol
from gpumgr.enforcement.mps.commands import Abilities, Protocol, ProtocolSetting
from gpumgr.enforcement.mps.control import Control
from gpumgr.enforcement.mps.daemon import Daemon, Setup
from gpumgr.enforcement.mps.errors import MpsError
from gpumgr.enforcement.mps.folders import SOCKET_PATH_BYTES, Share, socket_path_bytes
from gpumgr.enforcement.mps.modes import ComputeModes
from gpumgr.enforcement.mps.supervisor import DaemonStatus, Supervisor
from gpumgr.errors import Refusal
from gpumgr.units import Kind

_ALWAYS: Final = (
    "a fatal fault of one container's CUDA program ends the CUDA work of all containers on that GPU",
    "with mps.exclusive_process on, a container of another mechanism on the same GPU gets no CUDA context",
)
#: What the limits do not do, by protocol; for `gpumgr doctor` and the documentation.
CAVEATS: Final[Mapping[Protocol, tuple[str, ...]]] = {
    2: (
        "limits hold for each process: two processes of a container may use twice its memory and cores",
        "limits stand in the container's environment: a process that drops them gets those of the largest tenant of the GPU",
        "a container that runs as root reaches the daemon's control socket and can change the limits of all",
        *_ALWAYS,
    ),
    3: (
        "whether a namespace's memory limit counts for each process or for all together is not documented; take it for each process",
        "a process that sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for a GPU it can't see loses its memory limit (not its cores')",
        *_ALWAYS,
    ),
}
#: A stranger is told after so many further looks: a client that has just begun is not on the list yet.
_LOOKS: Final = 2

log = structlog.get_logger(__name__)


class Mps:
    """`limits`: both kinds, or only "core" where the driver itself limits memory. `state_dir` is on a disk, `run_dir` on a tmpfs.

    `program` is a path, or a name that PATH finds. `obstacle` tells what else the node lacks (MIG, GPUs older than Volta).
    """

    name: Final[BackendName] = "mps"

    def __init__(
        self,
        *,
        limits: Collection[Kind],
        program: str,
        setting: ProtocolSetting,
        run_dir: Path,
        state_dir: Path,
        modes: ComputeModes,
        exclusive_process: bool,
        idle_seconds: float,
        clock: Callable[[], float],
        check_seconds: float = 5.0,
        timeout_seconds: float = 5.0,
        how: launch.Launch | None = None,
        obstacle: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.limits: Final = frozenset(limits)
        self._root, self._state_dir = run_dir / "mps", state_dir
        self._program, self._setting, self._timeout_seconds = program, setting, timeout_seconds
        self._modes, self._exclusive, self._clock = modes, exclusive_process, clock
        self._check_seconds, self._idle_seconds = check_seconds, idle_seconds
        self._how, self._obstacle = how or launch.best(), obstacle
        self._keep = True
        self._supervisor: Supervisor | None = None
        self._strangers: dict[tuple[AllocationId, int], int] = {}

    # -- what the node can carry -------------------------------------------------------------------------------------------

    async def open(self, *, keep_protocol: bool) -> None:
        """Before anything else. `keep_protocol`: the ledger holds allocations of this backend, which were answered in a protocol."""
        self._keep = keep_protocol
        if (reason := await self.unavailable()) is not None:
            log.info("mps_unavailable", reason=reason)

    async def unavailable(self) -> str | None:
        program = shutil.which(self._program)
        if program is None:
            return (
                f"NVIDIA's MPS control program {self._program!r} was not found; it comes with the driver "
                "(package nvidia-compute-utils); set mps.control_program"
            )
        if (length := socket_path_bytes(self._root)) > SOCKET_PATH_BYTES:
            excess = length - SOCKET_PATH_BYTES
            return f"names of MPS sockets below {self._root} are {excess} bytes too long; choose a shorter enforcement.run_dir"
        if (reason := self._obstacle()) is not None:
            return reason
        try:
            control = Control(Path(program), timeout_seconds=self._timeout_seconds)
            await asyncio.to_thread(self._settle, control, await control.abilities())
        except (MpsError, OSError) as error:
            return str(error)
        return None

    def _settle(self, control: Control, abilities: Abilities) -> None:
        """Once in a life the protocol is decided; later looks only find out whether it is still there."""
        known = self._supervisor.setup.protocol if self._supervisor else None
        kept = known or (protocol.read(self._state_dir) if self._keep else None)
        spoken = protocol.settle(self._setting, abilities, kept)
        if self._supervisor is not None:
            return
        if self._setting not in ("auto", str(spoken)):
            log.warning("mps_protocol_kept", protocol=spoken, asked=self._setting, why="containers of this node use it")
        protocol.write(self._state_dir, spoken)
        setup = Setup(
            protocol=spoken,
            multiuser_option=abilities.multiuser_option,
            control=control,
            launch=self._how,
            modes=self._modes,
            exclusive=self._exclusive,
            limit_memory="memory" in self.limits,
            clock=self._clock,
        )
        self._supervisor = Supervisor(self._root, setup, check_seconds=self._check_seconds, idle_seconds=self._idle_seconds)

    def _ready(self) -> Supervisor:
        """Raises Refusal."""
        if self._supervisor is None:
            raise Refusal("internal", "MPS is not available on this node; `gpumgr doctor` on the node says why")
        return self._supervisor

    @property
    def caveats(self) -> tuple[str, ...]:
        return CAVEATS[self._supervisor.setup.protocol] if self._supervisor else ()

    # -- one tenant --------------------------------------------------------------------------------------------------------

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """Raises Refusal."""
        return injection.answer(tenant, kind, self._ready().setup.protocol, self.limits, self._root)

    async def start(self, tenant: Tenant) -> None:
        if not tenant.uuid.startswith("GPU-"):
            raise Refusal("internal", f"MPS can't share {tenant.uuid}: it takes whole GPUs, no MIG devices")
        daemon = self._ready().of(tenant.uuid)
        async with daemon.lock:
            try:
                await daemon.admit(tenant.allocation, _share(tenant))
            except (MpsError, OSError) as error:
                raise Refusal("internal", f"MPS can't limit {tenant.describe()} on GPU {tenant.gpu}: {error}") from error

    def remains(self) -> Collection[AllocationId]:
        return self._supervisor.allocations() if self._supervisor else ()

    async def cleanup(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        for daemon in self._ready().daemons():
            if allocation in daemon.folder.allocations():
                async with daemon.lock:
                    try:
                        await daemon.dismiss(allocation)
                    except MpsError as error:  # The daemon forgets it when it ends; nobody uses it any more.
                        log.warning("mps_tenant_not_dismissed", allocation=allocation, gpu=daemon.uuid, reason=str(error))

    async def vacate(self, uuids: Collection[str]) -> None:
        """Before a container gets these GPUs for itself: in EXCLUSIVE_PROCESS mode only one of its processes could use them.

        Needed while a daemon still waits for its idle time. Raises Refusal: the mode could not be given back.
        """
        for daemon in self._supervisor.daemons() if self._supervisor else ():
            if daemon.uuid in uuids:
                async with daemon.lock:
                    try:
                        await daemon.vacate()
                    except (MpsError, OSError) as error:
                        raise Refusal("internal", f"GPU {daemon.uuid} is not free of MPS yet: {error}") from error

    # -- all of them -------------------------------------------------------------------------------------------------------

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        """Daemons of an earlier life are adopted, or started again if they have ended meanwhile."""
        if self._supervisor is None:
            return
        for tenant in tenants:
            folder = self._supervisor.of(tenant.uuid).folder
            if tenant.allocation in folder.allocations():
                folder.put(tenant.allocation, _share(tenant))
        await self._supervisor.tick()

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        if self._supervisor is None:
            return ()
        views = {daemon.uuid: (daemon, self._view(daemon)) for daemon in self._supervisor.daemons()}
        seen: dict[tuple[AllocationId, int], int] = {}
        found: list[Finding] = []
        for each in running:
            daemon, view = views.get(each.tenant.uuid, (None, None))
            if daemon is None or view is None or each.tenant.allocation not in daemon.folder.allocations():
                found.append(findings.lost(each.tenant))
                continue
            keys = [(each.tenant.allocation, pid) for pid in findings.strangers(each, view)]
            seen |= {key: self._strangers.get(key, daemon.checks) for key in keys}
            lasting = [pid for key in keys if daemon.checks - seen[key] >= _LOOKS for pid in [key[1]]]
            users = {user for pid in each.pids if (user := processes.user_of(pid)) is not None}
            found += findings.judge(each, view, users, lasting)
        self._strangers = seen
        return found

    def _view(self, daemon: Daemon) -> findings.View:
        users = [user for pid in daemon.servers if (user := processes.user_of(pid)) is not None]
        return findings.View(
            protocol=daemon.setup.protocol,
            multiuser=daemon.setup.multiuser_option is not None,
            trouble=daemon.trouble,
            server_user=users[0] if users else None,
            clients=daemon.clients,
        )

    async def adjust(self, running: Sequence[Running]) -> None:  # noqa: ARG002
        if self._supervisor is not None:
            await self._supervisor.tick()

    def own_pids(self) -> Collection[int]:
        if self._supervisor is None:
            return ()
        return frozenset(pid for daemon in self._supervisor.daemons() for pid in daemon.own_pids())

    def status(self) -> tuple[DaemonStatus, ...]:
        return self._supervisor.status() if self._supervisor else ()

    async def close(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.close()


def _share(tenant: Tenant) -> Share:
    return Share(cores=tenant.cores, memory_bytes=tenant.memory_bytes)
