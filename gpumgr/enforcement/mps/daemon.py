"""One GPU's MPS control daemon: started at first use, adopted after a restart of the agent, restarted after a crash, and ended when idle.

Callers hold `lock` around each public coroutine except `try_client`. The daemon is no child process of the agent: its pipe folder shows
which process it is.
"""

import asyncio
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.common.errors import MpsError, MpsTimeoutError
from gpumgr.common.proc import is_running, start_time_ticks
from gpumgr.common.units import Process
from gpumgr.enforcement.mps import commands, launcher, processes
from gpumgr.enforcement.mps.client_trial import ClientTrial
from gpumgr.enforcement.mps.compute_mode import restore_mode, set_exclusive
from gpumgr.enforcement.mps.control import DaemonClient, DaemonConfig
from gpumgr.enforcement.mps.folders import DaemonRecords, GpuFolder, Share
from gpumgr.enforcement.mps.limits import Bounds, Limits, Namespaces, Tampering
from gpumgr.ledger.ledger import AllocationId

_START_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 3
_QUIT_SECONDS: Final = 5.0
#: Between two restarts of a daemon that keeps ending.
_RESTART_PAUSE_SECONDS: Final = 15.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Daemon:
    """`home`: the folder of a daemon that starts now. `trouble`: why it can't be used. `clients`: pid -> namespace (None in protocol 2).
    `checks`: how often clients were listed. `checked_at`: when the supervisor last began a check. `tampering`: found at the last check or
    later. `idle_since`: since when no container uses the daemon. `unused`: records of ended containers. `silent`: the last command did not
    end in time. `end_not_before`: when the agent may try again to end the daemon. Times are in seconds of the clock."""

    uuid: str
    home: GpuFolder
    records: DaemonRecords
    config: DaemonConfig
    process: Process | None = None
    servers: tuple[int, ...] = ()
    clients: Mapping[int, str | None] = field(default_factory=dict)
    #: server -> its clients, when they were last listed.
    _clients_of: Mapping[int, Mapping[int, str | None]] = field(default_factory=dict)
    trouble: str | None = None
    tampering: Tampering | None = None
    restarts: int = 0
    checks: int = 0
    checked_at: float = float("-inf")
    idle_since: float | None = None
    end_not_before: float = float("-inf")
    unused: frozenset[AllocationId] = frozenset()
    silent: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _not_before: float = float("-inf")
    trial: ClientTrial = field(init=False)
    #: What was set at the present process of the daemon.
    _limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self._limits, self.trial = self._new_limits(), ClientTrial(self.uuid)

    @property
    def folder(self) -> GpuFolder:
        """Differs from `home` if the daemon was started with another enforcement.run_dir."""
        record = self.records.of(self.uuid)
        return GpuFolder(Path(record.folder)) if record is not None else self.home

    @property
    def pid(self) -> int | None:
        """None if the daemon does not run."""
        return self.process[0] if self.process is not None and is_running(self.process) else None

    # -- limits ------------------------------------------------------------------------------------------------------------

    async def admit(self, allocation: AllocationId, share: Share) -> None:
        """Makes the daemon run and enforce the container's limits. Raises MpsError, OSError."""
        self.idle_since, self.unused = None, self.unused - {allocation}  # a claim that is prepared again has the same id
        await self._move_home(allocation)
        await self._replace_if_blocked(allocation)
        self.records.begin(self.uuid, self.folder.root)
        self.folder.make()
        self.folder.put(allocation, replace(share, former_bytes=share.memory_bytes))
        if self._is_healthy():
            await self._set_mode()
            await self._limit({allocation}, anew=False)
        else:
            try:
                adopted = await self.adopt()
            except MpsError:  # perhaps an earlier agent's daemon, of another protocol or driver
                if self._others(allocation):
                    raise
                await self.stop()
                await self.admit(allocation, share)
                return
            await (self._limit({allocation}) if adopted else self._start())
        self.folder.put(allocation, share)
        self.trouble, self.silent = None, False

    def _others(self, *mine: AllocationId) -> frozenset[AllocationId]:
        """The other containers that depend on the daemon. Raises OSError."""
        return frozenset(self.folder.allocations()) - self.unused - {*mine}

    def _is_healthy(self) -> bool:
        return (
            self.trouble is None
            and self.process is not None
            and self.checks > 0
            and processes.find_daemon(self.folder.pipe, self.process) == self.process
        )

    async def _move_home(self, allocation: AllocationId) -> None:
        """Ends the daemon if its folder is not `home`: a GPU has one daemon, and containers name the daemon's folder by path. If containers
        use the daemon, raises MpsError. Also raises OSError."""
        tenants = self.folder.allocations()
        if self.folder.root == self.home.root or allocation in tenants:
            return
        if tenants:
            raise MpsError(
                f"containers that share the GPU have their MPS daemon in {self.folder.root}, from before enforcement.run_dir was changed, "
                "and a GPU has one daemon: wait until they have ended, or set enforcement.run_dir back"
            )
        await self.stop()

    @property
    def blocked(self) -> str | None:
        """Why the daemon must be replaced; None if it works. It must be replaced if it answers no command: on an H200 a server that was
        stopped by a signal had this effect."""
        return self.trial.hang or (self.trouble if self.silent else None)

    async def _replace_if_blocked(self, allocation: AllocationId) -> None:
        """Ends a blocked daemon. Raises MpsError while other containers depend on it. Also raises OSError."""
        if self.blocked is None:
            return
        if others := self._others(allocation):
            raise MpsError(f"{self.blocked}; it is replaced when the other containers on it have ended ({len(others)})")
        await self.stop()

    async def resize(self, allocation: AllocationId, known: Share, share: Share, pids: Collection[int]) -> Mapping[Process, int]:
        """Protocol 3: changes the limits of new programs. `known`: the record. `pids`: the container's processes on the GPU.

        Returns the processes that keep a larger memory limit until they end, with that limit. Raises MpsError, OSError; call it again.
        """
        older = {each: limit_bytes for each, limit_bytes in known.older if is_running(each)}
        if known.limits != share.limits or known.former_bytes is not None:
            former_bytes = max(known.memory_bytes, known.former_bytes or 0)
            older = dict.fromkeys(processes.identified(pids), former_bytes) | older
            # Recorded before the limits change, so that a later call, perhaps of another agent process, continues.
            self.folder.put(allocation, share.with_older(older, former_bytes))
            if self.blocked is not None:  # each command would take seconds
                raise MpsError(self.blocked)
            await self._limit({allocation})
            await self._list()
            later = processes.identified(pid for pid, namespace in self.clients.items() if namespace == allocation)
            older = dict.fromkeys(later, max(former_bytes, share.memory_bytes)) | older
            self.folder.put(allocation, share.with_older(older))
        elif len(older) < len(known.older):
            self.folder.put(allocation, share.with_older(older))
        return {each: limit_bytes for each, limit_bytes in older.items() if limit_bytes > share.memory_bytes}

    async def remove(self, allocation: AllocationId) -> None:
        """Drops the record, and then the limits, of an ended container. Raises MpsError, OSError."""
        self.folder.drop(allocation)
        if processes.find_daemon(self.folder.pipe, self.process) is not None:
            await self._limits.drop(self._daemon_client, self.folder.shares(), allocation)

    async def vacate(self) -> None:
        """Ends the daemon. All containers on record must have ended. Raises MpsError, OSError."""
        for allocation in self.folder.allocations():
            self.folder.drop(allocation)
        await self.stop()

    def _new_limits(self) -> Limits:
        return Namespaces() if self.config.protocol == 3 else Bounds()

    async def _limit(self, allocations: Collection[AllocationId], *, anew: bool = True) -> None:
        """Sets the limits of these containers in protocol 3, of all clients in protocol 2. `anew`: also limits that were set already."""
        await self._limits.put(self._daemon_client, self.folder.shares(), allocations, anew=anew)

    async def _restore_limits(self) -> Tampering | None:
        """Raises MpsError, OSError."""
        found = await self._limits.restore(self._daemon_client, await asyncio.to_thread(self.folder.shares), self.servers)
        if found is not None:
            log.warning("mps_limits_changed", gpu=self.uuid, what=found.what, containers=sorted(found.concerned), put_right=True)
        return found

    # -- the daemon --------------------------------------------------------------------------------------------------------

    async def adopt(self) -> bool:
        """Takes over the daemon if it runs, and returns whether it does. Raises MpsError if it does not answer."""
        found = processes.find_daemon(self.folder.pipe, self.process)
        if found is None:
            return False
        if found != self.process:
            self.process, self._limits = found, self._new_limits()
            self.trial.hang, self.silent = None, False
            log.info("mps_daemon_adopted", gpu=self.uuid, pid=found[0])
        if self.folder.allocations():
            await self._set_mode()
        servers = await self._list()
        if self.config.protocol == 3 and commands.SERVER not in servers:
            await self._create_server()
            await self._limit(self.folder.allocations())
        return True

    async def check(self) -> None:
        """Checks the daemon, corrects its limits, and restarts it if it has ended and is needed; sets `trouble` and `tampering`."""
        try:
            if await self.adopt():
                self.tampering = await self._restore_limits()
            elif self._others():
                await self._restart()
            self.trouble, self.silent = None, False
        except (MpsError, OSError) as error:
            self._set_trouble(error)

    def _set_trouble(self, error: Exception) -> None:
        if str(error) != self.trouble:
            log.warning("mps_daemon_trouble", gpu=self.uuid, reason=str(error))
        # A command that timed out before the daemon ran leaves nothing to replace.
        self.trouble, self.silent = str(error), isinstance(error, MpsTimeoutError) and self.pid is not None

    async def guard(self) -> None:
        """Between checks, in protocol 3: corrects changed namespaces by one run of the control program. A daemon that has ended or reports
        an error is checked at once."""
        if self.trouble is not None or not self._others():
            return
        try:
            if self.pid is None:
                raise MpsError("it has ended")
            self.tampering = await self._restore_limits() or self.tampering
        except (MpsError, OSError):
            await self.check()

    async def _restart(self) -> None:
        now = self.config.clock()
        if now < self._not_before:
            raise MpsError(f"the MPS daemon of GPU {self.uuid} keeps ending; it is restarted soon; see {self.folder.log}")
        self._not_before = now + _RESTART_PAUSE_SECONDS
        self.restarts += 1
        before = self.process and self.process[0]
        log.warning("mps_daemon_restarting", gpu=self.uuid, before=before, restarts=self.restarts)
        if before is not None and await asyncio.to_thread(self.folder.ended_by_command, before):
            self.tampering = Tampering("ended the daemon", frozenset(self.folder.allocations()), root_only=True)
        await self._start()

    async def _start(self) -> None:
        if (other := await asyncio.to_thread(processes.daemon_of_others, self.uuid)) is not None:
            raise MpsError(
                f"another program has started an MPS daemon for GPU {self.uuid} (process {other[0]}, pipe folder {other[1]}), and a GPU "
                f"has one daemon: end it for good: `echo quit | CUDA_MPS_PIPE_DIRECTORY={other[1]} nvidia-cuda-mps-control`"
            )
        self.folder.make()
        await self._set_mode()
        if not any(start_time_ticks(pid) is not None for pid in self.clients):  # running clients would lose their work
            self._end_servers()
        self.folder.clear_pipe()
        await self._mount_shm(mounted=True)
        config = self.config
        # The daemon finds the server program, which is beside the control program, only in PATH.
        program = config.control.program
        folder = f"{program.parent}{os.pathsep}" if program.is_absolute() else ""
        environment = {**self._daemon_client.environment, "PATH": f"{folder}{os.environ.get('PATH', os.defpath)}"}
        argv = [str(config.control.program), *commands.start_arguments(config.protocol, config.multiuser_option)]
        wrapped = launcher.daemon_command(config.launcher, self.uuid, self.folder.shm, environment, argv)
        await config.control.run(wrapped, environment, self.folder.log / "start.log")
        await self._await_answer()
        if config.protocol == 3:
            await self._create_server()
        await self._limit(self.folder.allocations())
        assert self.process is not None
        self.trouble = None
        log.info("mps_daemon_started", gpu=self.uuid, pid=self.process[0], protocol=config.protocol)

    async def _await_answer(self) -> None:
        waited = 0.0
        while (found := processes.find_daemon(self.folder.pipe, self.process)) is None:
            if waited >= _START_SECONDS:
                raise MpsError(f"the MPS daemon of GPU {self.uuid} did not come up within {waited:g} s; see {self.folder.log}")
            await asyncio.sleep(processes.POLL_SECONDS)
            waited += processes.POLL_SECONDS
        self.process, self._limits, self.servers, self.clients = found, self._new_limits(), (), {}
        self.trial.hang, self.silent = None, False
        await self._list()

    async def _create_server(self) -> None:
        """Raises MpsError, also if the server is not listed afterwards: a server for a missing GPU ends at once."""
        await self._daemon_client.run(commands.create_server(self.uuid, multiuser=bool(self.config.multiuser_option)))
        if commands.SERVER not in commands.parse_servers(3, await self._daemon_client.run(commands.list_servers(3))):
            raise MpsError(f"the MPS server of GPU {self.uuid} ended at once; see {self.folder.log / commands.SERVER}/server.log")

    async def _list(self) -> Collection[str]:
        """Returns the servers' names. Raises MpsError."""
        protocol = self.config.protocol
        named = commands.parse_servers(protocol, await self._daemon_client.run(commands.list_servers(protocol)))
        self.servers = tuple(pid for pid in named.values() if pid is not None)
        self._clients_of = {
            pid: commands.parse_clients(
                protocol, await self._daemon_client.run_for_server(pid, commands.list_clients(protocol, pid)) or ""
            )
            for pid in self.servers
        }
        clients = {client: namespace for each in self._clients_of.values() for client, namespace in each.items()}
        self.trial.client_left |= not self.clients.keys() <= clients.keys()
        self.clients = clients
        self.checks += 1
        return named

    @property
    def client_due(self) -> bool:
        return bool(self.servers) and self.trial.due(self.config.clock())

    async def try_client(self) -> None:
        """Called without `lock`, since a trial may hang."""
        process = self.process
        await self.trial.run(self.config, self.folder, lambda: self.servers if self.process == process else None)

    async def end_clients(self, pids: Collection[int]) -> None:
        """`pids` need not be clients of the daemon. Raises MpsError."""
        if self.pid is None:
            return
        await self._list()
        for server, clients in self._clients_of.items():
            ending = sorted(clients.keys() & set(pids))
            # The kubelet soon kills all these processes, so a client that can't be terminated must not delay the others.
            ended = await asyncio.gather(*(self._terminate(server, pid) for pid in ending), return_exceptions=True)
            if error := next(filter(None, ended), None):
                raise error

    async def _terminate(self, server: int, pid: int) -> None:
        """Raises MpsError."""
        await self._daemon_client.run_for_server(server, commands.terminate_client(self.config.protocol, server, pid))
        log.info("mps_client_terminated", gpu=self.uuid, pid=pid, server=server)

    async def stop(self) -> None:
        """Ends the daemon and removes its files. Raises MpsError or OSError if something is left; a later call continues."""
        found = processes.find_daemon(self.folder.pipe, self.process)
        if found is not None:
            await self._quit(found)
        self._end_servers()
        self.process, self.servers, self.clients, self.trial.hang, self.silent = None, (), {}, None, False
        await restore_mode(self.config.modes, self.uuid, self.records)
        await self._mount_shm(mounted=False)
        await asyncio.to_thread(self.folder.remove)
        self.records.drop(self.uuid)
        log.info("mps_daemon_stopped", gpu=self.uuid, pid=found and found[0])

    async def _quit(self, process: Process) -> None:
        """Raises MpsError."""
        if not self.silent:
            try:
                await self._daemon_client.run(commands.quit_daemon(self.config.protocol, _PATIENCE_SECONDS))
                await processes.wait_for_exit(process, _QUIT_SECONDS)
            except MpsError as error:
                log.warning("mps_daemon_does_not_quit", gpu=self.uuid, pid=process[0], reason=str(error))
        if not await processes.end(process, _QUIT_SECONDS):
            raise MpsError(f"the MPS daemon of GPU {self.uuid}, process {process[0]}, can't be ended; check the kernel's log")

    def _end_servers(self) -> None:
        """Ends servers that outlived their daemon; kills blocked ones."""
        for pid in self.servers:
            started = start_time_ticks(pid)
            if started is not None and processes.uses_pipe_folder(pid, self.folder.pipe):
                processes.send_signal((pid, started), signal.SIGTERM if self.blocked is None else signal.SIGKILL)

    # -- GPU and /dev/shm ---------------------------------------------------------------------------------------------------------

    async def _set_mode(self) -> None:
        change = set_exclusive if self.config.exclusive else restore_mode
        await change(self.config.modes, self.uuid, self.records)

    async def _mount_shm(self, *, mounted: bool) -> None:
        """Raises MpsError."""
        command = launcher.shm_command(self.config.launcher, self.folder.shm, mounted=mounted)
        if command is not None and self.folder.shm.is_mount() != mounted:
            await self.config.control.run(command, {}, self.folder.log / "mount.log")

    @property
    def _daemon_client(self) -> DaemonClient:
        return DaemonClient(self.config, self.uuid, self.folder)
