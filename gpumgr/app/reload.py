"""The settings file changes while the agent runs: what can be applied is applied, the rest is named, and a bad file changes nothing.

Rule 1. A file counts as changed when it was replaced or rewritten and then looked the same twice: nobody reads half of it. A ConfigMap's
        files are links that the kubelet moves to a new folder, so what is looked at is the file behind the link.
Rule 2. SIGHUP reads it at once, changed or not.
Rule 3. All or nothing: with one mistake in the file, no setting of it counts, and the node has an event that says so.
Rule 4. Nothing that is in the file or in its place ends or holds up the agent: neither a bug of ours that it brings to light, nor a file
        system that hangs.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import structlog

from gpumgr.agent.history import History
from gpumgr.aio import Bugs, DaemonCalls
from gpumgr.allocator.history import Entry
from gpumgr.errors import InputError
from gpumgr.settings import Settings
from gpumgr.settings.live import Reload, reload

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: How often the file is looked at.
LOOK_SECONDS: Final = 1.0
#: How long the file system may take.
READ_SECONDS: Final = 15.0
#: For so long the same reason to reject a file is not told a second time, but in the log.
REPEAT_SECONDS: Final = 600.0
#: Of what is wrong with a file, so much is told.
MAX_REASON: Final = 4096
REJECTED: Final = "rejected"
RELOADED: Final = "reloaded"

#: Device, inode, time of change in nanoseconds and size of a file; None while there is none.
Identity = tuple[int, int, int, int] | None


@dataclass(kw_only=True)
class Source:
    """Where the settings come from. Make it before they are read for the first time; `ask` whenever they are to be read again.

    `load` reads all layers anew, and raises InputError if something is wrong with them.
    """

    path: Path
    load: Callable[[], Settings]
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    read_as: Identity = None

    def __post_init__(self) -> None:
        self.read_as = identity(self.path)

    def ask(self) -> None:
        self.asked.set()


class Reloading:
    """`apply` puts settings in force that differ from those of before in live keys alone. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        source: Source,
        *,
        in_force: Settings,
        apply: Callable[[Settings], None],
        history: History,
        look_seconds: float = LOOK_SECONDS,
        read_seconds: float = READ_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._in_force, self._apply, self._history = source, in_force, apply, history
        self._look_seconds, self._read_seconds, self._clock = look_seconds, read_seconds, clock
        self._calls = DaemonCalls("settings")
        self._bugs = Bugs("reloading", clock=clock)
        self._seen = source.read_as
        self._needs_restart: tuple[str, ...] = ()
        self._hangs = False
        #: Why the file was rejected when it was last read, and when that was told.
        self._rejected: str | None = None
        self._told_at = float("-inf")

    async def run(self) -> NoReturn:
        """Until cancelled."""
        asked = self._source.asked
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await asked.wait()
            try:
                await self._look()
            except TimeoutError:
                if asked.is_set() or not self._hangs:
                    self._reject(f"{self._source.path} can't be read: its file system gives no answer")
                asked.clear()
                self._hangs = True

    async def _look(self) -> None:
        """Raises TimeoutError if the file system hangs."""
        source = self._source
        before, self._seen = self._seen, await self._aside(partial(identity, source.path))
        if source.asked.is_set() or self._hangs or self._seen == before != source.read_as:
            source.asked.clear()
            written = await self._read()
            source.read_as, self._hangs = self._seen, False
            if written is not None:
                self._put_in_force(written)

    async def _read(self) -> Settings | None:
        """None, and it is told, if something is wrong with the file. Raises TimeoutError."""
        try:
            return await self._aside(self._source.load)
        except InputError as error:
            self._reject(str(error))
        except TimeoutError:
            raise
        except Exception as error:
            self._bugs.tell(error)
            self._reject(f"a bug, please report it: {error!r}")
        return None

    async def _aside(self, work: Callable[[], T]) -> T:
        return await self._calls.call(work, timeout_seconds=self._read_seconds)

    def _put_in_force(self, written: Settings) -> None:
        outcome = reload(self._in_force, written)
        try:
            self._apply(outcome.settings)
        except Exception as error:
            self._bugs.tell(error)
            self._reject(f"a bug, please report it: {error!r}")
            self._apply(self._in_force)
            return
        self._in_force = outcome.settings
        tell = log.warning if outcome.needs_restart else log.info
        tell("config_reloaded", path=str(self._source.path), applied=outcome.applied, needs_restart=outcome.needs_restart)
        if self._rejected is not None or outcome.applied or outcome.needs_restart != self._needs_restart:
            self._tell(RELOADED, _told(outcome))
        self._rejected, self._needs_restart = None, outcome.needs_restart

    def _reject(self, why: str) -> None:
        reason = " ".join(why[:MAX_REASON].split())
        log.error(
            "config_rejected", path=str(self._source.path), reason=reason, consequence="the settings of before stay in force"
        )
        now = self._clock()
        if reason != self._rejected or now - self._told_at >= REPEAT_SECONDS:
            self._rejected, self._told_at = reason, now
            self._tell(REJECTED, f"the settings of before stay in force: {reason}")

    def _tell(self, code: str, why: str) -> None:
        self._history.add(Entry(at=self._history.now(), what="config", code=code, why=why))


def _told(outcome: Reload) -> str:
    parts = (
        f"applied: {', '.join(outcome.applied)}" if outcome.applied else "",
        f"needs a restart of the agent: {', '.join(outcome.needs_restart)}" if outcome.needs_restart else "",
    )
    return "; ".join(filter(None, parts)) or "the file says what is in force"


def identity(path: Path) -> Identity:
    """Of the file that `path` names or links to."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
