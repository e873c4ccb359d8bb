"""Reads the settings file again after a change or SIGHUP, and applies the live keys, which take effect without a restart.

* A file counts as changed when two consecutive checks find the same new identity, so that no half-written file is read. A ConfigMap's file
  is a link that the kubelet points to a new folder, so the file behind the link is compared.
* If the file has an error, none of its settings is applied.
* No content of the file ends the agent. A file system that hangs does not block the agent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import structlog

from gpumgr.common.aio import DaemonCalls, until_tick, wait_at_most
from gpumgr.common.errors import InputError
from gpumgr.common.files import FileIdentity
from gpumgr.settings.schema import Settings, is_live, sections

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The interval of the checks, which run on a thread of their own.
CHECK_SECONDS: Final = 2.0
#: How long the file system may take to answer.
READ_SECONDS: Final = 15.0
#: The longest reason in the log and in the event, in characters.
MAX_REASON: Final = 4096
REJECTED: Final = "rejected"
RELOADED: Final = "reloaded"


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """`settings`: the previous settings with the changed live keys. `applied`: the dotted live keys that differ. `needs_restart`: the other
    dotted keys that differ. The keys are in the order of the sections."""

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
    """The settings file. Create this object before the settings are read for the first time, so that no change of the file is missed. `ask`
    requests another read. `read_as` is the identity of the file when it was last read.

    `load` reads file, environment and flags, and raises InputError if one of them is wrong.
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
    """`apply` receives settings that differ from the previous ones only in live keys. `record` receives REJECTED or RELOADED and a sentence
    for the history. If a bug makes `run` raise, `run` can be called again."""

    def __init__(
        self,
        source: SettingsSource,
        *,
        current: Settings,
        apply: Callable[[Settings], None],
        record: Callable[[str, str], None],
        check_seconds: float = CHECK_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._source, self._current, self._apply, self._record = source, current, apply, record
        self._check_seconds, self._read_seconds = check_seconds, read_seconds
        self._calls = DaemonCalls("settings")
        self._seen = source.read_as
        self._needs_restart: tuple[str, ...] = ()
        #: Why the last read was rejected.
        self._rejected: str | None = None

    async def run(self) -> NoReturn:
        asked = self._source.asked
        while True:
            await wait_at_most(asked, until_tick(self._check_seconds))
            was_asked = asked.is_set()
            asked.clear()
            try:
                await self._check(read=was_asked)
            except TimeoutError:
                self._source.read_as = None  # so the file is read as soon as the file system answers
                self._reject(f"{self._source.path} can't be read: its file system gives no answer", log_again=was_asked)
            except InputError as error:
                self._reject(str(error), log_again=was_asked)

    async def _check(self, *, read: bool) -> None:
        """Reads the file if `read` is true or it has changed, and applies its settings. Raises TimeoutError if the file system hangs, and
        the errors of `load`."""
        source = self._source
        before, self._seen = self._seen, await self._call(partial(FileIdentity.at, source.path))
        if read or self._seen == before != source.read_as:
            source.read_as = self._seen
            written = await self._call(source.load)
            self._apply_settings(written)

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._calls.call(work, timeout_seconds=self._read_seconds)

    def _apply_settings(self, written: Settings) -> None:
        outcome = reload(self._current, written)
        self._apply(outcome.settings)
        self._current = outcome.settings
        write = log.warning if outcome.needs_restart else log.info
        write("config_reloaded", path=str(self._source.path), applied=outcome.applied, needs_restart=outcome.needs_restart)
        if self._rejected is not None or outcome.applied or outcome.needs_restart != self._needs_restart:
            self._record(RELOADED, _sentence(outcome))
        self._rejected, self._needs_restart = None, outcome.needs_restart

    def _reject(self, why: str, *, log_again: bool) -> None:
        """Logs and records that the file's settings are not applied. The same reason again is not recorded, and is logged only if
        `log_again`."""
        reason = " ".join(why[:MAX_REASON].split())
        if reason != self._rejected or log_again:
            log.error(
                "config_rejected", path=str(self._source.path), reason=reason, consequence="the previous settings stay in effect"
            )
        if reason != self._rejected:
            self._rejected = reason
            self._record(REJECTED, f"the previous settings stay in effect: {reason}")


def _sentence(outcome: Reload) -> str:
    parts = (
        f"applied: {', '.join(outcome.applied)}" if outcome.applied else "",
        f"needs a restart of the agent: {', '.join(outcome.needs_restart)}" if outcome.needs_restart else "",
    )
    return "; ".join(filter(None, parts)) or "the file has the settings that are in effect"
