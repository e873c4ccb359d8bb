"""All daemons of the node: which GPUs have one, looking after them, ending the idle ones."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.enforcement.mps.commands import Protocol
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.errors import MpsError
from gpumgr.enforcement.mps.folders import GpuFolder, gpu_folders
from gpumgr.enforcement.mps.modes import DEFAULT
from gpumgr.enforcement.mps.records import Records
from gpumgr.enforcement.mps.setup import Setup

#: So long a tick waits for what it has begun; a daemon that hangs keeps nobody else waiting.
_TICK_SECONDS: Final = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """For people and metrics. `pid` None: it does not run. `clients` and `restarts` are counts; restarts since the agent began."""

    gpu: str
    protocol: Protocol
    pid: int | None
    tenants: int
    clients: int
    restarts: int
    trouble: str | None


class Supervisor:
    """`root` holds one folder for each GPU, `records` tell which of them there are, and which are elsewhere.

    A daemon is looked at every `check_seconds`, and ends `idle_seconds` after its last tenant.
    """

    def __init__(self, root: Path, setup: Setup, records: Records, *, check_seconds: float, idle_seconds: float) -> None:
        """Raises OSError."""
        self.root, self.setup, self._records = root, setup, records
        self._check_seconds, self._idle_seconds = check_seconds, idle_seconds
        self._daemons: dict[str, Daemon] = {}
        self._looked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for uuid, folder in gpu_folders(root):  # of which the records were lost, and with them the mode before
            records.begin(uuid, folder.root, former_mode=DEFAULT)

    def equip(self, setup: Setup) -> None:
        """From here on with another program, perhaps a newer one; the protocol is the same."""
        self.setup = setup
        for daemon in list(self._daemons.values()):  # not from the loop's thread
            daemon.setup = setup

    def of(self, uuid: str) -> Daemon:
        """One object for each GPU, whoever asks first: `own_pids` asks on a thread."""
        return self._daemons.setdefault(uuid, Daemon(uuid, GpuFolder(self.root / uuid), self._records, self.setup))

    def daemons(self) -> Sequence[Daemon]:
        """Those that something is kept for, of this life or an earlier one. Out of memory."""
        return [self.of(uuid) for uuid in self._records.uuids()]

    def allocations(self) -> Collection[AllocationId]:
        """Raises OSError."""
        return {allocation for daemon in self.daemons() for allocation in daemon.folder.allocations()}

    async def tick(self) -> None:
        """Looks after the daemons that are due. What takes longer goes on by itself."""
        now = self.setup.clock()
        daemons = self.daemons()
        looked = {daemon.uuid: self._looked.get(daemon.uuid, float("-inf")) for daemon in daemons}
        due = [d for d in daemons if now - looked[d.uuid] >= self._check_seconds and d.uuid not in self._tasks]
        # A few in each tick, the longest waiting first: each look runs programs.
        for daemon in sorted(due, key=lambda d: looked[d.uuid])[: -(-len(daemons) // int(max(1, self._check_seconds)))]:
            self._looked[daemon.uuid] = now
            self._begin(daemon)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_TICK_SECONDS)

    def _begin(self, daemon: Daemon) -> None:
        task = asyncio.create_task(self._tend(daemon), name=f"mps {daemon.uuid}")
        self._tasks[daemon.uuid] = task
        task.add_done_callback(lambda done: self._ended(daemon, done))

    def _ended(self, daemon: Daemon, task: asyncio.Task[None]) -> None:
        self._tasks.pop(daemon.uuid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("mps_daemon_not_tended", gpu=daemon.uuid, error=str(error), kind=type(error).__name__)

    async def _tend(self, daemon: Daemon) -> None:
        async with daemon.lock:
            await daemon.check()
            if daemon.folder.allocations():
                daemon.idle_since = None
                return
            now = self.setup.clock()
            if daemon.idle_since is None:
                daemon.idle_since = now
            if now - daemon.idle_since < self._idle_seconds:
                return
            try:
                await daemon.stop()
            except (MpsError, OSError) as error:
                log.warning("mps_daemon_not_ended", gpu=daemon.uuid, reason=str(error))

    def status(self) -> tuple[DaemonStatus, ...]:
        return tuple(
            DaemonStatus(
                gpu=daemon.uuid,
                protocol=self.setup.protocol,
                pid=daemon.pid,
                tenants=_tenants(daemon),
                clients=len(daemon.clients),
                restarts=daemon.restarts,
                trouble=daemon.trouble,
            )
            for daemon in self.daemons()
        )

    async def close(self) -> None:
        """Stops looking; the daemons go on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tenants(daemon: Daemon) -> int:
    with contextlib.suppress(OSError):  # a count for people
        return len(daemon.folder.allocations())
    return 0
