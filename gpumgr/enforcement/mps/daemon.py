"""One GPU's control daemon: started at first use, adopted after a restart of the agent, started again after a crash, ended at last.

Callers hold `lock` around every coroutine here. The daemon's process is nobody's child: it is known by its pipe folder alone.
"""

import asyncio
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.enforcement.mps import bounds, commands, launch, modes, namespaces, processes
from gpumgr.enforcement.mps.bounds import Bounds
from gpumgr.enforcement.mps.errors import MpsError
from gpumgr.enforcement.mps.folders import GpuFolder, Share
from gpumgr.enforcement.mps.processes import Process
from gpumgr.enforcement.mps.records import Records
from gpumgr.enforcement.mps.setup import Setup
from gpumgr.enforcement.mps.talk import Talk

_START_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 3
_QUIT_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
#: After a crash the daemon is started at once, after further ones with pauses that double.
_LONGEST_PAUSE_SECONDS: Final = 60.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Daemon:
    """`home`: its folder if it is begun now. `trouble` says why it can't be used at present. `checks` counts looks that were answered.
    `tampered`: at the last look its limits were not those that it had been told."""

    uuid: str
    home: GpuFolder
    records: Records
    setup: Setup
    process: Process | None = None
    servers: tuple[int, ...] = ()
    clients: Mapping[int, str | None] = field(default_factory=dict)
    trouble: str | None = None
    tampered: bool = False
    restarts: int = 0
    checks: int = 0
    idle_since: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _failures: int = 0
    _not_before: float = 0.0
    _settled_at: float = 0.0
    _bounds: Bounds = field(default_factory=Bounds)
    #: What this very process was told last, so that it is not told twice; the checks find out if somebody changed it.
    _told: dict[AllocationId, Share] = field(default_factory=dict)
    _told_process: Process | None = None
    _told_bound: bounds.Bound | None = None

    @property
    def folder(self) -> GpuFolder:
        """Where it is: not `home` if it was begun when enforcement.run_dir was another."""
        record = self.records.of(self.uuid)
        return GpuFolder(record.folder) if record is not None else self.home

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        return self.process[0] if self.process is not None and processes.lives(self.process) else None

    # -- tenants -----------------------------------------------------------------------------------------------------------

    async def admit(self, allocation: AllocationId, share: Share) -> None:
        """The daemon runs and keeps the tenant's limits when this returns. Raises MpsError, OSError."""
        self.idle_since = None
        await self._come_home(allocation)
        self.records.begin(self.uuid, self.folder.root)
        self.folder.make()
        self.folder.put(allocation, share)
        if self._is_well():
            await self._claim()
            await self._limit({allocation: share}, anew=False)
        elif await self.adopt():
            await self._limit({allocation: share})
        else:
            await self._start()
        self.trouble = None

    def _is_well(self) -> bool:
        """It answered at the last look, some seconds ago, and is the same process still."""
        return (
            self.trouble is None
            and self.process is not None
            and self.checks > 0
            and processes.find_daemon(self.folder.pipe) == self.process
        )

    async def _come_home(self, allocation: AllocationId) -> None:
        """One daemon for a GPU: whoever is on record elsewhere stays there, for what its container was given names that place.

        Raises MpsError: others are still there. Raises OSError.
        """
        tenants = self.folder.allocations()
        if self.folder == self.home or allocation in tenants:
            return
        if tenants:
            raise MpsError(
                f"containers that share it have their MPS daemon in {self.folder.root}, from before enforcement.run_dir was changed, "
                "and a GPU has one daemon: wait until they have ended, or set enforcement.run_dir back"
            )
        await self.stop()

    async def dismiss(self, allocation: AllocationId) -> None:
        """The tenant is gone. Raises MpsError, OSError; its record is dropped in any case."""
        self.folder.drop(allocation)
        self._told.pop(allocation, None)
        if processes.find_daemon(self.folder.pipe) is None:
            return
        if self.setup.protocol == 3:
            await namespaces.drop(self._talk, allocation)
        else:
            await self._limit({})

    async def vacate(self) -> None:
        """The GPU is no longer shared, so whoever is still on record has ended. Raises MpsError, OSError."""
        for allocation in self.folder.allocations():
            self.folder.drop(allocation)
        await self.stop()

    async def _limit(self, shares: Mapping[AllocationId, Share], *, anew: bool = True) -> None:
        """Protocol 3 limits these, protocol 2 only knows all together."""
        if anew or self._told_process != self.process:
            self._told, self._told_process, self._told_bound = {}, self.process, None
        if self.setup.protocol == 3:
            new = {name: share for name, share in shares.items() if not self._was_told(name, share)}
            if new:
                await namespaces.limit(self._talk, self.folder, new, limit_memory=self.setup.limit_memory)
                self._told.update(new)
        elif (bound := self._bound()) is not None and bound != self._told_bound:
            await self._bounds.put(self._talk, bound)
            self._told_bound = bound

    def _was_told(self, allocation: AllocationId, share: Share) -> bool:
        return self._told.get(allocation) == share and (self.folder.namespace(allocation) / "control").exists()

    def _bound(self) -> bounds.Bound | None:
        return bounds.largest(self.folder.shares().values(), limit_memory=self.setup.limit_memory)

    async def _hold(self) -> bool:
        """Puts right what a tenant may have changed; whether it was so. Raises MpsError, OSError."""
        if self.setup.protocol == 3 or (bound := await asyncio.to_thread(self._bound)) is None:
            return False
        changed = await self._bounds.hold(self._talk, bound, self.servers)
        if changed:
            log.warning(
                "mps_limits_changed", gpu=self.uuid, by="a process that reached the daemon's control socket", put_right=True
            )
        return changed

    # -- the daemon --------------------------------------------------------------------------------------------------------

    async def adopt(self) -> bool:
        """Whether it runs; then it has answered. Raises MpsError: it runs and does not answer."""
        found = processes.find_daemon(self.folder.pipe)
        if found is None:
            return False
        if found != self.process:
            self.process, self._settled_at = found, self.setup.clock()
            log.info("mps_daemon_adopted", gpu=self.uuid, pid=found[0])
        if self.folder.allocations():
            await self._claim()
        servers = await self._look()
        if self.setup.protocol == 3 and commands.SERVER not in servers:
            await self._create_server()
            await self._limit(self.folder.shares())
        return True

    async def check(self) -> None:
        """Looks after it once; `trouble` tells the outcome."""
        try:
            if await self.adopt():
                self.tampered = await self._hold()
            elif self.folder.allocations():
                await self._restart()
            self.trouble = None
            if self.setup.clock() - self._settled_at >= _LONGEST_PAUSE_SECONDS:
                self._failures = 0
        except (MpsError, OSError) as error:
            if str(error) != self.trouble:
                log.warning("mps_daemon_trouble", gpu=self.uuid, reason=str(error))
            self.trouble = str(error)

    async def _restart(self) -> None:
        now = self.setup.clock()
        if now < self._not_before:
            raise MpsError(f"the MPS daemon of GPU {self.uuid} keeps ending; it is started again soon; see {self.folder.log}")
        self._failures += 1
        self._not_before = now + min(2.0**self._failures, _LONGEST_PAUSE_SECONDS)
        self.restarts += 1
        log.warning("mps_daemon_restarting", gpu=self.uuid, before=self.process and self.process[0], restarts=self.restarts)
        await self._start()

    async def _start(self) -> None:
        self.folder.make()
        await self._claim()
        self._end_servers(without_clients=True)
        self.folder.clear_pipe()
        await self._mount_shm()
        setup, environment = self.setup, self._environment()
        words = commands.start(setup.protocol, setup.multiuser_option).words
        argv = [str(setup.control.program), *words]
        wrapped = launch.daemon_command(setup.launch, self.uuid, self.folder.shm, environment, argv)
        await setup.control.run(wrapped, environment, self.folder.log / "start.log")
        await self._await_answer()
        if setup.protocol == 3:
            await self._create_server()
        await self._limit(self.folder.shares())
        assert self.process is not None
        self.trouble, self._settled_at = None, setup.clock()
        log.info("mps_daemon_started", gpu=self.uuid, pid=self.process[0], protocol=setup.protocol)

    async def _await_answer(self) -> None:
        waited = 0.0
        while (found := processes.find_daemon(self.folder.pipe)) is None:
            if waited >= _START_SECONDS:
                raise MpsError(f"the MPS daemon of GPU {self.uuid} did not come up within {waited:g} s; see {self.folder.log}")
            await asyncio.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        self.process, self.servers, self.clients = found, (), {}
        await self._look()

    async def _create_server(self) -> None:
        """A server for a GPU that is not there is accepted and then vanishes: so it is looked up afterwards."""
        await self._talk.ask(commands.create_server(self.uuid, multiuser=self.setup.multiuser_option is not None))
        if commands.SERVER not in commands.parse_servers(3, await self._talk.ask(commands.list_servers(3))):
            raise MpsError(f"the MPS server of GPU {self.uuid} ended at once; see {self.folder.log / commands.SERVER}/server.log")

    async def _look(self) -> Collection[str]:
        """Learns servers and clients; the servers' names. Raises MpsError."""
        protocol = self.setup.protocol
        named = commands.parse_servers(protocol, await self._talk.ask(commands.list_servers(protocol)))
        self.servers = tuple(pid for pid in named.values() if pid is not None)
        clients: dict[int, str | None] = {}
        for pid in self.servers:
            answer = await self._talk.ask_of_server(pid, commands.list_clients(protocol, pid))
            clients |= commands.parse_clients(protocol, answer or "")
        self.clients = clients
        self.checks += 1
        return named

    async def stop(self) -> None:
        """Ends it and leaves nothing behind. Raises MpsError, OSError: something is left, and it may be tried again."""
        found = processes.find_daemon(self.folder.pipe)
        if found is not None:
            await self._quit(found)
        self._end_servers(without_clients=False)
        self.process, self.servers, self.clients = None, (), {}
        await modes.give_back(self.setup.modes, self.uuid, self.records)
        await self._unmount_shm()
        await asyncio.to_thread(self.folder.remove)
        self.records.drop(self.uuid)
        log.info("mps_daemon_stopped", gpu=self.uuid, pid=found and found[0])

    async def _quit(self, process: Process) -> None:
        """Asks first, then takes. Raises MpsError."""
        try:
            await self._talk.ask(commands.quit_daemon(self.setup.protocol, _PATIENCE_SECONDS))
            gone = await processes.gone(process, _QUIT_SECONDS)
        except MpsError as error:
            log.warning("mps_daemon_does_not_quit", gpu=self.uuid, pid=process[0], reason=str(error))
            gone = False
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not gone:
                processes.send(process, number)
                gone = await processes.gone(process, _QUIT_SECONDS)
        if not gone:
            raise MpsError(f"the MPS daemon of GPU {self.uuid}, process {process[0]}, can't be ended; look into the kernel's log")

    def _end_servers(self, *, without_clients: bool) -> None:
        """Servers that outlived their daemon. Work that runs on them goes on until it ends by itself: they are spared."""
        clients_live = any(processes.start_time(pid) is not None for pid in self.clients)
        if without_clients and clients_live:
            return
        for pid in self.servers:
            started = processes.start_time(pid)
            if started is not None and processes.belongs(pid, self.folder.pipe):
                processes.send((pid, started), signal.SIGTERM)

    def own_pids(self) -> frozenset[int]:
        """The daemon, its servers (its children), and servers that outlived it."""
        left = {pid for pid in self.servers if processes.belongs(pid, self.folder.pipe)}
        pid = self.pid
        return frozenset(left if pid is None else {pid, *processes.children(pid), *left})

    # -- around it ---------------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        act = modes.claim if self.setup.exclusive else modes.give_back
        await act(self.setup.modes, self.uuid, self.records)

    async def _mount_shm(self) -> None:
        command = launch.mount_command(self.setup.launch, self.folder.shm)
        if command is not None and not self.folder.shm.is_mount():
            await self.setup.control.run(command, {}, self.folder.log / "mount.log")

    async def _unmount_shm(self) -> None:
        command = launch.unmount_command(self.setup.launch, self.folder.shm)
        if command is not None and self.folder.shm.is_mount():
            await self.setup.control.run(command, {}, self.folder.log / "mount.log")

    @property
    def _talk(self) -> Talk:
        return Talk(self.setup.control, self._environment())

    def _environment(self) -> Mapping[str, str]:
        return commands.environment(self.setup.protocol, self.uuid, self.folder.pipe, self.folder.log)
