"""The ledger on disk: sqlite in WAL mode, synchronous=FULL, one connection, written by one thread.

Invariants:
1. `save` returns after fsync, and a decision takes effect only then. If `save` raises, nothing was changed.
2. A change is one transaction: if the process is killed, the next start finds all of it or nothing.
3. A corrupt file is renamed and reported; it is never read as an empty ledger, and never deleted.

`read_checkpoint` also works beside a running agent. It changes no row; sqlite may write the log (-wal) of a killed agent into the main
file.
"""

import asyncio
import contextlib
import os
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, Self
from urllib.parse import quote

from gpumgr.common.errors import CheckpointError
from gpumgr.common.files import sync_folder
from gpumgr.ledger import tables
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Change
from gpumgr.ledger.tables import CorruptError, Loaded, checksum

NAME: Final = "gpumgr.sqlite3"
_COMPANIONS: Final = ("-wal", "-shm")
_MIN_PAGE_BYTES: Final = 512

_FULL: Final = "make room on its file system"
_ACCESS: Final = "make its folder writable for the user that gpumgr runs as, or set checkpoint.dir to another one"
_DISK: Final = "check the kernel log for disk errors"
_BUSY: Final = "another program holds the file; only one agent may run on a node"
_CORRUPT: Final = "start the agent again: it renames the file and rebuilds the ledger from the kubelet's state"

_ADVICE: Final = {
    "SQLITE_FULL": _FULL,
    "SQLITE_READONLY": _ACCESS,
    "SQLITE_CANTOPEN": _ACCESS,
    "SQLITE_PERM": _ACCESS,
    "SQLITE_IOERR": _DISK,
    "SQLITE_BUSY": _BUSY,
    "SQLITE_LOCKED": _BUSY,
    "SQLITE_NOMEM": "give the agent more memory",
    "SQLITE_PROTOCOL": _BUSY,
}

#: A function for the writer thread, and its result; None ends the thread.
_Job = tuple[Callable[[], None], Future[None]] | None


class SqliteCheckpoint:
    """Call `save` and `save_note` from one event loop, and `close` at the end."""

    def __init__(self, connection: sqlite3.Connection, path: Path, loaded: Loaded) -> None:
        self._connection, self._path, self._loaded = connection, path, loaded
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, folder: Path, *, outlive: Collection[str] = (), wall_clock: Callable[[], float] = time.time) -> Self:
        """Opens or creates the checkpoint in `folder` and reads it. Blocks for some milliseconds.

        A corrupt file is renamed: then `load()` has `lost` and `set_aside`, and the readable notes with the keys `outlive` are copied into
        the new file. Raises CheckpointError if the folder can't be used, or if a newer gpumgr wrote the file.
        """
        path = prepare(folder)
        existed = path.stat().st_size > 0
        try:
            connection, loaded = _open(path, fresh=not existed)
        except CorruptError as error:
            notes, notes_lost = _intact_notes(path, outlive)
            aside = set_aside(path, wall_clock())
            prepare(folder)
            connection, _ = _open(path, fresh=True, notes=notes)
            loaded = Loaded(notes=notes, notes_lost=notes_lost, lost=True, set_aside=aside, why=str(error))
        return cls(connection, path, loaded)

    def load(self) -> Loaded:
        """As read at `open`."""
        return self._loaded

    async def save(self, change: Change) -> None:
        """Raises CheckpointError."""
        if change:
            await self._run(lambda: tables.write_change(self._connection, change))

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:
        """Saves a text, and entries of the history in the same transaction. Raises CheckpointError."""

        def write() -> None:
            tables.write_note(self._connection, key, value)
            tables.write_entries(self._connection, entries)

        await self._run(write)

    async def close(self, timeout_seconds: float = 2.0) -> bool:
        """Finishes the requested writes and closes the file. False: the disk was too slow, and the file is still open."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    async def _run(self, work: Callable[[], None]) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpoint {self._path} is closed")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a cancelled caller stops waiting, but the write is completed
        self._jobs.put((work, done))
        try:
            await asyncio.wrap_future(done)
        except sqlite3.Error as error:
            raise translate(error, self._path, "write") from error
        except OSError as error:
            raise CheckpointError(f"can't reach the checkpoint {self._path}: {error.strerror or error}; {_DISK}") from error

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                if not self._path.exists():  # sqlite would write to the removed file, which the next start can't find
                    raise CheckpointError(f"the checkpoint {self._path} was removed; start the agent again: it makes a new one")
                _transact(self._connection, work)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


def _transact(connection: sqlite3.Connection, work: Callable[[], None]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        work()
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _open(path: Path, *, fresh: bool, notes: Mapping[str, str] = MappingProxyType({})) -> tuple[sqlite3.Connection, Loaded]:
    """A new file gets `notes`. Raises CorruptError or CheckpointError."""
    check_header(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
    try:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise CheckpointError(f"the file system of {path} can't hold a write-ahead log; set checkpoint.dir to a local disk")
        connection.execute("PRAGMA synchronous=FULL")
        if tables.is_empty(connection):
            _transact(connection, lambda: tables.create(connection, notes))
            sync_folder(path.parent)
            why = "there was no checkpoint yet" if fresh else "the file held no tables"
            return connection, Loaded(lost=True, why=why)
        tables.check(connection, path)
        loaded = tables.read(connection)
        if broken := loaded.ledger.violations():
            raise CorruptError(f"the checkpoint {path} contradicts itself: {broken[0]}")
        return connection, loaded
    except sqlite3.Error as error:
        connection.close()
        raise translate(error, path, "open") from error
    except CheckpointError:
        connection.close()
        raise


def _intact_notes(path: Path, keys: Collection[str]) -> tuple[Mapping[str, str], bool]:
    """The sound notes with these keys in a corrupt file, and whether a missing one may have been in the damaged part. Reads a copy, so that
    the file stays unchanged. Raises nothing."""
    notes: dict[str, str] = {}
    whole = True
    try:
        with tempfile.TemporaryDirectory(prefix="gpumgr-checkpoint-") as folder:
            for source in (path, path.with_name(f"{path.name}-wal")):
                if source.exists():
                    shutil.copyfile(source, Path(folder) / source.name)
            with contextlib.closing(sqlite3.connect(Path(folder) / path.name, isolation_level=None)) as connection:
                for row in connection.execute("SELECT CAST(key AS BLOB), CAST(value AS BLOB), sum FROM notes"):
                    note = _sound(row)
                    if note is None:
                        whole = False
                    elif note[0] in keys:
                        notes[note[0]] = note[1]
    except (OSError, sqlite3.Error):
        whole = False
    return notes, not whole and notes.keys() < set(keys)


def _sound(row: tuple[bytes | None, bytes | None, int]) -> tuple[str, str] | None:
    key, value, sum_ = row
    try:
        note = (key or b"").decode(), (value or b"").decode()
    except UnicodeDecodeError:
        return None
    return note if sum_ == checksum(*note) else None


def read_checkpoint(folder: Path) -> Loaded:
    """The present content of the checkpoint; `lost` if there is no file, or no table in it. Raises CheckpointError for a file that is
    corrupt, newer than this gpumgr, or not readable."""
    path = folder / NAME
    try:
        path.stat()
        return _read(path)
    except FileNotFoundError:
        return Loaded(lost=True, why=f"there is no checkpoint at {path}")
    except OSError as error:
        raise CheckpointError(f"can't read the checkpoint {path}: {error.strerror or error}") from error


def _read(path: Path) -> Loaded:
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, isolation_level=None, timeout=2.0)
        ) as connection:
            connection.execute("PRAGMA query_only=ON")
            if tables.is_empty(connection):
                return Loaded(lost=True, why=f"the checkpoint {path} holds no tables")
            tables.check(connection, path)
            return tables.read(connection)
    except sqlite3.Error as error:
        raise translate(error, path, "read") from error


# -- the file --------------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> Path:
    """Creates the checkpoint's file if it is missing, with mode 0600. Raises CheckpointError."""
    path = folder / NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # sqlite creates its -wal and -shm files with the mode of this file. While a connection is open, no descriptor of this file may be
        # closed, because that drops sqlite's locks.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"can't open the checkpoint {path}: {error.strerror or error}; {_ACCESS}") from error
    return path


def check_header(path: Path) -> None:
    """Raises CorruptError for a file that sqlite would treat as empty or as read-only. Call it before a connection is open: closing the
    file would drop its locks. Source of the layout: sqlite's file format, section 1.3."""
    try:
        with path.open("rb") as file:
            header = file.read(_MIN_PAGE_BYTES)
    except OSError as error:
        raise CheckpointError(f"can't open the checkpoint {path}: {error.strerror or error}; {_ACCESS}") from error
    if header and (len(header) < _MIN_PAGE_BYTES or header[:16] != b"SQLite format 3\0" or not set(header[18:20]) <= {1, 2}):
        raise CorruptError(f"{path} does not begin like a sqlite file")


def set_aside(path: Path, now_seconds: float) -> Path:
    """Renames the file and its -wal and -shm files, and returns the new name. Raises CheckpointError."""
    stamp = datetime.fromtimestamp(now_seconds, UTC).strftime("%Y%m%dT%H%M%SZ")
    names = (path.with_name(f"{path.name}.corrupt-{stamp}{f'.{n}' if n else ''}") for n in range(1 << 16))
    try:
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        for companion in _COMPANIONS:
            old = path.with_name(path.name + companion)
            if old.exists():
                old.rename(aside.with_name(aside.name + companion))
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} is corrupt and can't be renamed: {error.strerror or error}; {_ACCESS}"
        ) from error
    return aside


def translate(error: sqlite3.Error, path: Path, verb: Literal["open", "read", "write"]) -> CheckpointError:
    """sqlite's error as a CheckpointError with path, cause and remedy. An error without an entry in _ADVICE (no such table, not a database,
    text that is not UTF-8) means corrupt content: CorruptError."""
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    problem = f"can't {verb} the checkpoint {path}: {error} ({name})"
    advice = next((advice for prefix, advice in _ADVICE.items() if name.startswith(prefix)), None)
    if advice is not None:
        return CheckpointError(f"{problem}; {advice}")
    return CorruptError(f"{problem}; {_CORRUPT}" if verb == "write" else problem)
