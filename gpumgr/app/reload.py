"""The settings file changes while the agent runs: what can be applied is applied, the rest is named, and a bad file changes nothing.

Rule 1. A file counts as changed when it was replaced or rewritten and then looked the same twice: nobody reads half of it. A ConfigMap's
        files are links that the kubelet moves to a new folder, so what is looked at is the file behind the link.
Rule 2. SIGHUP reads it at once, changed or not.
Rule 3. All or nothing: with one mistake in the file, no setting of it counts, and the node has an event that says so.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import structlog

from gpumgr.agent.history import History
from gpumgr.allocator.history import Entry
from gpumgr.errors import InputError
from gpumgr.settings import Settings
from gpumgr.settings.live import Reload, reload

log = structlog.get_logger(__name__)

#: How often the file is looked at.
LOOK_SECONDS: Final = 1.0
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
    """`apply` puts settings in force that differ from those of before in live keys alone."""

    def __init__(
        self,
        source: Source,
        *,
        in_force: Settings,
        apply: Callable[[Settings], None],
        history: History,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._source, self._in_force, self._apply, self._history = source, in_force, apply, history
        self._look_seconds = look_seconds
        self._needs_restart: tuple[str, ...] = ()
        self._rejected = False

    async def run(self) -> NoReturn:
        """Until cancelled."""
        source = self._source
        seen = source.read_as
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await source.asked.wait()
            before, seen = seen, await asyncio.to_thread(identity, source.path)
            if source.asked.is_set() or seen == before != source.read_as:
                source.asked.clear()
                source.read_as = seen
                await self._reload()

    async def _reload(self) -> None:
        try:
            written = await asyncio.to_thread(self._source.load)
        except InputError as error:
            self._reject(" ".join(str(error).split()))
            return
        outcome = reload(self._in_force, written)
        self._in_force = outcome.settings
        self._apply(outcome.settings)
        tell = log.warning if outcome.needs_restart else log.info
        tell("config_reloaded", path=str(self._source.path), applied=outcome.applied, needs_restart=outcome.needs_restart)
        if self._rejected or outcome.applied or outcome.needs_restart != self._needs_restart:
            self._tell(RELOADED, _told(outcome))
        self._rejected, self._needs_restart = False, outcome.needs_restart

    def _reject(self, reason: str) -> None:
        self._rejected = True
        log.error(
            "config_rejected", path=str(self._source.path), reason=reason, consequence="the settings of before stay in force"
        )
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
