"""Reads the settings file again when it has changed, and applies what can be applied without a restart.

- A file counts as changed when two consecutive checks find the same new identity, so that no half-written file is read. A file of a
  ConfigMap is a link, which the kubelet points to a new folder, so the identity is the identity of the link's target.
- SIGHUP reads the file at once, changed or not.
- All or nothing: with one error in the file, none of its settings is applied, and the node gets an event that says so.
- Neither the content of the file nor a file system that hangs ends or blocks the agent.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import structlog

from gpumgr.common.aio import BugLog, DaemonCalls, until_tick
from gpumgr.common.errors import InputError
from gpumgr.common.files import FileIdentity
from gpumgr.settings.schema import Settings, is_live, sections

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The interval of the checks of the file, and the interval after a check that found a change. The checks run on a thread of their own.
CHECK_SECONDS: Final = 2.0
RECHECK_SECONDS: Final = 0.5
#: How long the file system may take to answer.
READ_SECONDS: Final = 15.0
#: Within this time, the same reason to reject a file is logged again, but gets no further event.
REPEAT_SECONDS: Final = 600.0
#: Longest reason in the log and in the event.
MAX_REASON: Final = 4096
REJECTED: Final = "rejected"
RELOADED: Final = "reloaded"


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reload. `settings`: the previous settings with the changed live keys (keys that take effect without a restart).
    `applied`, `needs_restart`: the dotted keys that differ, in the order of the sections."""

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reload(current: Settings, written: Settings) -> Reload:
    """Applies the live keys of `written` to `current`."""
    applied, needs_restart, changed = list[str](), list[str](), dict[str, Any]()
    for section, keys in sections().items():
        old, new = getattr(current, section), getattr(written, section)
        different = [key for key in keys if getattr(old, key) != getattr(new, key)]
        live = {key: getattr(new, key) for key in different if is_live(keys[key])}
        if live:
            changed[section] = msgspec.structs.replace(old, **live)
        applied += [f"{section}.{key}" for key in live]
        needs_restart += [f"{section}.{key}" for key in different if key not in live]
    return Reload(
        settings=msgspec.structs.replace(current, **changed), applied=tuple(applied), needs_restart=tuple(needs_restart)
    )


@dataclass(kw_only=True)
class SettingsSource:
    """The settings file. Create it before the settings are read for the first time; call `ask` to have them read again.

    `load` reads all layers (file, environment, flags) and raises InputError if something is wrong with them.
    """

    path: Path
    load: Callable[[], Settings]
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    read_as: FileIdentity | None = None

    def __post_init__(self) -> None:
        self.read_as = FileIdentity.at(self.path)

    def ask(self) -> None:
        self.asked.set()


class SettingsReloader:
    """`apply` receives settings that differ from `current` only in live keys. `record` receives, for the history, what happened (REJECTED,
    RELOADED) and a sentence about it. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        source: SettingsSource,
        *,
        current: Settings,
        apply: Callable[[Settings], None],
        record: Callable[[str, str], None],
        check_seconds: float = CHECK_SECONDS,
        read_seconds: float = READ_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._current, self._apply, self._record = source, current, apply, record
        self._check_seconds, self._read_seconds, self._clock = check_seconds, read_seconds, clock
        self._calls = DaemonCalls("settings")
        self._bugs = BugLog("settings_reload", clock=clock)
        self._seen = source.read_as
        self._needs_restart: tuple[str, ...] = ()
        self._hangs = False
        #: Why the file was rejected when it was last read, and when that was added to the history.
        self._rejected: str | None = None
        self._rejected_at = float("-inf")

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        asked = self._source.asked
        while True:
            changed = self._seen != self._source.read_as
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    until_tick(min(RECHECK_SECONDS, self._check_seconds) if changed else self._check_seconds)
                ):
                    await asked.wait()
            try:
                await self._check()
            except TimeoutError:
                if asked.is_set() or not self._hangs:
                    self._reject(f"{self._source.path} can't be read: its file system gives no answer")
                asked.clear()
                self._hangs = True

    async def _check(self) -> None:
        """Raises TimeoutError if the file system hangs."""
        source = self._source
        before, self._seen = self._seen, await self._call(partial(FileIdentity.at, source.path))
        if source.asked.is_set() or self._hangs or self._seen == before != source.read_as:
            source.asked.clear()
            written = await self._read()
            source.read_as, self._hangs = self._seen, False
            if written is not None:
                self._apply_settings(written)

    async def _read(self) -> Settings | None:
        """None if the file was rejected. Raises TimeoutError."""
        try:
            return await self._call(self._source.load)
        except InputError as error:
            self._reject(str(error))
        except TimeoutError:
            raise
        except Exception as error:
            self._bugs.record(error)
            self._reject(f"a bug, please report it: {error!r}")
        return None

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._calls.call(work, timeout_seconds=self._read_seconds)

    def _apply_settings(self, written: Settings) -> None:
        outcome = reload(self._current, written)
        try:
            self._apply(outcome.settings)
        except Exception as error:
            self._bugs.record(error)
            self._reject(f"a bug, please report it: {error!r}")
            self._apply(self._current)
            return
        self._current = outcome.settings
        write = log.warning if outcome.needs_restart else log.info
        write("config_reloaded", path=str(self._source.path), applied=outcome.applied, needs_restart=outcome.needs_restart)
        if self._rejected is not None or outcome.applied or outcome.needs_restart != self._needs_restart:
            self._record(RELOADED, _sentence(outcome))
        self._rejected, self._needs_restart = None, outcome.needs_restart

    def _reject(self, why: str) -> None:
        reason = " ".join(why[:MAX_REASON].split())
        log.error(
            "config_rejected", path=str(self._source.path), reason=reason, consequence="the previous settings stay in effect"
        )
        now = self._clock()
        if reason != self._rejected or now - self._rejected_at >= REPEAT_SECONDS:
            self._rejected, self._rejected_at = reason, now
            self._record(REJECTED, f"the previous settings stay in effect: {reason}")


def _sentence(outcome: Reload) -> str:
    parts = (
        f"applied: {', '.join(outcome.applied)}" if outcome.applied else "",
        f"needs a restart of the agent: {', '.join(outcome.needs_restart)}" if outcome.needs_restart else "",
    )
    return "; ".join(filter(None, parts)) or "the file has the settings that are in effect"
