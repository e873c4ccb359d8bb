"""Backend "mps": implements gpumgr.enforcement.backend.Backend."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.mps import findings, injection, launch, processes, program, protocol
from gpumgr.enforcement.mps.caveats import CAVEATS
from gpumgr.enforcement.mps.commands import Abilities, Protocol, ProtocolSetting
from gpumgr.enforcement.mps.control import Control
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.errors import MpsError, Unanswered
from gpumgr.enforcement.mps.folders import SOCKET_PATH_BYTES, Share, gpu_folders, socket_path_bytes
from gpumgr.enforcement.mps.modes import ComputeModes
from gpumgr.enforcement.mps.records import Records
from gpumgr.enforcement.mps.setup import Setup
from gpumgr.enforcement.mps.supervisor import DaemonStatus, Supervisor
from gpumgr.errors import Refusal
from gpumgr.units import Kind

#: A stranger is told after so many further looks: a client that has just begun is not on the list yet.
_LOOKS: Final = 2
#: So many of a container's processes, the first ones, are asked for their user. One that waits for MPS is on no list of the driver's.
_USERS_OF: Final = 16

log = structlog.get_logger(__name__)


class Mps:
    """`limits`: both kinds, or only "core" to leave memory to the driver. A tenant that also has the mechanism nvml-memory is bound by
    both then, at the same size: what its container is answered can't depend on that. `state_dir` is on a disk, `run_dir` on a tmpfs.

    `program` is a path, or a name that PATH finds. `obstacle` tells what else the node lacks (MIG, GPUs older than Volta).
    `in_pod`: the agent is a container of the kubelet's, and MPS is the host's. `transient`: what `unavailable` said last may pass by
    itself.
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
        in_pod: bool = False,
    ) -> None:
        self.limits: Final = frozenset(limits)
        self._root, self._state_dir = run_dir / "mps", state_dir
        self._program, self._setting, self._timeout_seconds = program, setting, timeout_seconds
        self._modes, self._exclusive, self._clock = modes, exclusive_process, clock
        self._check_seconds, self._idle_seconds = check_seconds, idle_seconds
        self._how, self._obstacle = how or launch.best(in_pod=in_pod), obstacle
        self._keep = True
        self._supervisor: Supervisor | None = None
        self.transient = False
        self._strangers: dict[tuple[AllocationId, int], int] = {}

    # -- what the node can carry -------------------------------------------------------------------------------------------

    async def open(self, *, keep_protocol: bool) -> None:
        """Before anything else. `keep_protocol`: the ledger holds allocations of this backend, which were answered in a protocol."""
        self._keep = keep_protocol
        if (reason := await self.unavailable()) is not None:
            log.info("mps_unavailable", reason=reason)

    async def unavailable(self) -> str | None:
        reason = await self._look_for_obstacle()
        if reason is not None and self._supervisor is None:
            await asyncio.to_thread(self._resume)
        return reason

    async def _look_for_obstacle(self) -> str | None:
        self.transient = False
        if (length := socket_path_bytes(self._root)) > SOCKET_PATH_BYTES:
            excess = length - SOCKET_PATH_BYTES
            return f"names of MPS sockets below {self._root} are {excess} bytes too long; choose a shorter enforcement.run_dir"
        if (reason := self._obstacle()) is not None:
            return reason
        try:
            control = await program.find(self._program, self._how, self._root.parent, timeout_seconds=self._timeout_seconds)
            await asyncio.to_thread(self._settle, control, await control.abilities())
        except (MpsError, OSError) as error:
            self.transient = isinstance(error, (Unanswered, OSError))
            return str(error)
        return None

    def _settle(self, control: Control, abilities: Abilities) -> None:
        """Once in a life the protocol is decided; later looks only find out whether it is still there. Raises MpsError, OSError."""
        known = self._supervisor.setup.protocol if self._supervisor else None
        kept = known or (protocol.read(self._state_dir) if self._keep else None)
        spoken = protocol.settle(self._setting, abilities, kept)
        if known is None and self._setting not in ("auto", str(spoken)):
            log.warning("mps_protocol_kept", protocol=spoken, asked=self._setting, why="containers of this node use it")
        if protocol.read(self._state_dir) != spoken:
            protocol.write(self._state_dir, spoken)
        self._equip(spoken, control, abilities.multiuser_option)

    def _resume(self) -> None:
        """MPS is not available, but daemons of an earlier life may be there: they are looked after as well as it goes, for their GPUs
        are in EXCLUSIVE_PROCESS mode and their containers are to hear of it."""
        try:
            if Records(self._records_dir).uuids() or any(gpu_folders(self._root)):
                before = launch.on_host(self._how)
                control = Control(Path(self._program), timeout_seconds=self._timeout_seconds, before=before)
                self._equip(protocol.read(self._state_dir) or 2, control, None)
        except OSError as error:
            log.warning("mps_daemons_not_looked_after", reason=str(error))

    def _equip(self, spoken: Protocol, control: Control, multiuser_option: str | None) -> None:
        """Raises OSError."""
        setup = Setup(
            protocol=spoken,
            multiuser_option=multiuser_option,
            control=control,
            launch=self._how,
            modes=self._modes,
            exclusive=self._exclusive,
            limit_memory="memory" in self.limits,
            clock=self._clock,
        )
        if self._supervisor is not None:
            return self._supervisor.equip(setup)
        self._supervisor = Supervisor(
            self._root,
            setup,
            Records(self._records_dir),
            check_seconds=self._check_seconds,
            idle_seconds=self._idle_seconds,
        )
        return None

    @property
    def _records_dir(self) -> Path:
        return self._state_dir / "mps"

    def _ready(self) -> Supervisor:
        """Raises Refusal."""
        if self._supervisor is None:
            raise Refusal("internal", "MPS is not available on this node; `gpumgr doctor` on the node says why")
        return self._supervisor

    @property
    def limits_processes(self) -> bool:
        """Protocol 2 keeps each process within the limits, not all of a container's together."""
        return self._supervisor is not None and self._supervisor.setup.protocol == 2

    @property
    def caveats(self) -> tuple[str, ...]:
        return CAVEATS[self._supervisor.setup.protocol] if self._supervisor else ()

    # -- one tenant --------------------------------------------------------------------------------------------------------

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """Raises Refusal."""
        return self.answer(tenant, kind, self.limits)

    def answer(self, tenant: Tenant, kind: Kind, limits: Collection[Kind]) -> ContainerResponse:
        """With only these limits. Raises Refusal."""
        return injection.answer(tenant, kind, self._ready().setup.protocol, limits, self._root)

    async def start(self, tenant: Tenant) -> None:
        await self.admit(tenant, _share(tenant))

    async def admit(self, tenant: Tenant, share: Share) -> None:
        """The tenant's container may go up to `share` on its GPU. Raises Refusal."""
        if not tenant.uuid.startswith("GPU-"):
            raise Refusal("internal", f"MPS can't share {tenant.uuid}: it takes whole GPUs, no MIG devices")
        daemon = self._ready().of(tenant.uuid)
        async with daemon.lock:
            try:
                await daemon.admit(tenant.allocation, share)
            except (MpsError, OSError) as error:
                raise Refusal("internal", f"MPS can't limit {tenant.describe()} on GPU {tenant.gpu}: {error}") from error

    def remains(self) -> Collection[AllocationId]:
        return self._supervisor.allocations() if self._supervisor else ()

    async def cleanup(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        for daemon in self._supervisor.daemons() if self._supervisor else ():
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
        """Raises OSError."""
        if self._supervisor is None or not running:
            return ()
        return await asyncio.to_thread(self._judge, self._supervisor.daemons(), running)

    def _judge(self, daemons: Sequence[Daemon], running: Sequence[Running]) -> Sequence[Finding]:
        """Reads files of processes: not for the event loop."""
        looks = {daemon.uuid: (daemon, _view(daemon), frozenset(daemon.folder.allocations())) for daemon in daemons}
        seen: dict[tuple[AllocationId, int], int] = {}
        found: list[Finding] = []
        for each in running:
            tenant = each.tenant
            daemon, view, kept = looks.get(tenant.uuid, (None, None, frozenset()))
            if daemon is None or view is None or tenant.allocation not in kept:
                found.append(findings.lost(tenant))
                continue
            first = {pid: self._strangers.get((tenant.allocation, pid), daemon.checks) for pid in findings.strangers(each, view)}
            seen |= {(tenant.allocation, pid): at for pid, at in first.items()}
            lasting = [pid for pid, at in first.items() if daemon.checks - at >= _LOOKS]
            asked = each.pids[:_USERS_OF] if findings.unserved(each, view) else ()
            users = {user for pid in asked if (user := processes.user_of(pid)) is not None}
            found += findings.judge(each, view, users, lasting)
        others = {name for *_, kept in looks.values() for name in kept} - {each.tenant.allocation for each in running}
        self._strangers = {key: at for key, at in self._strangers.items() if key[0] in others} | seen
        return found

    async def adjust(self, running: Sequence[Running]) -> None:  # noqa: ARG002
        if self._supervisor is not None:
            await self._supervisor.tick()

    def own_pids(self) -> Collection[int]:
        daemons = self._supervisor.daemons() if self._supervisor else ()
        return frozenset(pid for daemon in daemons for pid in daemon.own_pids())

    def status(self) -> tuple[DaemonStatus, ...]:
        return self._supervisor.status() if self._supervisor else ()

    def restarts(self) -> Mapping[str, int]:
        """Of each GPU's daemon since the agent began, by UUID. Out of memory, unlike `status`."""
        return {daemon.uuid: daemon.restarts for daemon in self._supervisor.daemons()} if self._supervisor else {}

    async def close(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.close()


def _share(tenant: Tenant) -> Share:
    return Share(cores=tenant.cores, memory_bytes=tenant.memory_bytes)


def _view(daemon: Daemon) -> findings.View:
    users = [user for pid in daemon.servers if (user := processes.user_of(pid)) is not None]
    return findings.View(
        protocol=daemon.setup.protocol,
        multiuser=daemon.setup.multiuser_option is not None,
        trouble=daemon.trouble,
        tampered=daemon.tampered,
        server_user=users[0] if users else None,
        clients=daemon.clients,
    )
