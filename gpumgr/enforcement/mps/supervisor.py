"""All MPS daemons of the node: checks them periodically, and ends idle ones."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from gpumgr.common.errors import MpsError
from gpumgr.enforcement.mps.compute_mode import DEFAULT
from gpumgr.enforcement.mps.control import DaemonConfig
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.folders import DaemonRecords, GpuFolder, gpu_folders
from gpumgr.ledger.ledger import AllocationId

_CHECK_SECONDS: Final = 5.0
#: How long a tick waits for its checks; longer ones continue in the background.
_TICK_SECONDS: Final = 1.0

log = structlog.get_logger(__name__)


class Supervisor:
    """`root`: has one folder for each GPU. `records`: also has daemons with a folder elsewhere.

    A daemon is checked every _CHECK_SECONDS; in protocol 3 its namespaces are checked at every tick. Records do not show whether a daemon
    is in use: a container's record is kept for enforcement.orphan_grace_seconds after its end.
    """

    def __init__(self, root: Path, config: DaemonConfig, records: DaemonRecords, *, idle_seconds: float) -> None:
        """Raises OSError."""
        self.root, self.config, self._records = root, config, records
        self._idle_seconds = idle_seconds
        self._daemons: dict[str, Daemon] = {}
        #: UUID of the GPU -> why its daemon could not be ended, as logged.
        self._not_ended: dict[str, str] = {}
        #: UUID of the GPU -> the task that holds its daemon's lock, and the trial of a new client.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trials: dict[str, asyncio.Task[None]] = {}
        for uuid, folder in gpu_folders(root):  # without a record the former mode is unknown: restore DEFAULT
            records.begin(uuid, folder.root, former_mode=DEFAULT)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Uses another control program, perhaps a newer one, of the same protocol."""
        self.config = config
        for daemon in list(self._daemons.values()):  # `own_pids` may add one on another thread
            daemon.config = config

    def of(self, uuid: str) -> Daemon:
        """The GPU's only `Daemon`, made at the first call. Threads may call it."""
        return self._daemons.setdefault(uuid, Daemon(uuid, GpuFolder(self.root / uuid), self._records, self.config))

    def daemons(self) -> Sequence[Daemon]:
        """The daemons on record, also an earlier agent's. Reads no file."""
        return [self.of(uuid) for uuid in self._records.uuids()]

    async def tick(self) -> None:
        now = self.config.clock()
        for daemon in self.daemons():
            due = now - daemon.checked_at >= _CHECK_SECONDS
            if daemon.uuid not in self._tasks and (due or self.config.protocol == 3):
                daemon.checked_at = now if due else daemon.checked_at
                self._begin(self._tasks, daemon, Daemon.check if due else Daemon.guard)
            if daemon.client_due and daemon.uuid not in self._trials:
                self._begin(self._trials, daemon, Daemon.try_client)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_TICK_SECONDS)

    def _begin(self, tasks: dict[str, asyncio.Task[None]], daemon: Daemon, work: Callable[[Daemon], Awaitable[None]]) -> None:
        """`tasks`: `_tasks` if the work needs the daemon's lock, else `_trials`."""
        tasks[daemon.uuid] = asyncio.create_task(self._run(tasks, daemon, work), name=f"mps {daemon.uuid}")

    async def _run(self, tasks: dict[str, asyncio.Task[None]], daemon: Daemon, work: Callable[[Daemon], Awaitable[None]]) -> None:
        try:
            async with daemon.lock if tasks is self._tasks else contextlib.nullcontext():
                await work(daemon)
        except Exception as error:  # a bug must not end the checks of the other daemons
            log.error("mps_daemon_not_checked", gpu=daemon.uuid, error=str(error), kind=type(error).__name__)
        finally:
            del tasks[daemon.uuid]

    async def end_idle(self, known: Callable[[], Collection[AllocationId]]) -> float | None:
        """Ends each daemon `idle_seconds` after its last container has ended, a blocked one at once. `known` returns the allocations that
        exist now. Returns the seconds until the next end is due; None if all daemons are in use."""
        now, due = self.config.clock(), list[float]()
        for daemon in self.daemons():
            if _in_use(daemon, known()):
                daemon.idle_since = None
                continue
            if daemon.idle_since is None:
                daemon.idle_since = now
            patience = self._idle_seconds if daemon.blocked is None else 0.0
            due.append(max(daemon.idle_since + patience, daemon.end_not_before) - now)
            if due[-1] <= 0 and daemon.uuid not in self._tasks:
                self._begin(self._tasks, daemon, partial(self._end, known=known))
        if self._tasks and any(seconds <= 0 for seconds in due):
            await asyncio.wait(self._tasks.values(), timeout=_TICK_SECONDS)
        return min(due, default=None)

    async def _end(self, daemon: Daemon, *, known: Callable[[], Collection[AllocationId]]) -> None:
        if _in_use(daemon, known()):  # a container may have begun to use it
            return
        try:
            await daemon.stop()
            self._not_ended.pop(daemon.uuid, None)
        except Exception as error:
            daemon.end_not_before = self.config.clock() + _CHECK_SECONDS
            if not isinstance(error, MpsError | OSError):  # a bug
                raise
            if self._not_ended.get(daemon.uuid) != str(error):
                log.warning("mps_daemon_not_ended", gpu=daemon.uuid, reason=str(error))
            self._not_ended[daemon.uuid] = str(error)

    async def close(self) -> None:
        """Stops the checks; the daemons continue."""
        tasks = [*self._tasks.values(), *self._trials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_use(daemon: Daemon, known: Collection[AllocationId]) -> bool:
    """Whether a recorded container still exists. Sets `unused`."""
    try:
        recorded = frozenset(daemon.folder.allocations())
        daemon.unused = frozenset(each for each in recorded if each not in known)
        return daemon.unused != recorded
    except OSError:  # the records may be of running containers
        return True
