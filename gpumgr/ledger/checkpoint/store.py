"""The ledger on disk: sqlite in WAL mode, synchronous=FULL, one connection, written by one thread.

Invariants:
1. `save` returns after fsync, and a decision takes effect only then. If `save` raises, nothing was changed.
2. A change is one transaction: if the process is killed, the next start finds all of it or nothing.
3. A corrupt file is renamed and reported; it is never read as an empty ledger, and never deleted.

`read_checkpoint` works with and without a running agent. It changes no row; sqlite may write the log (-wal) of a killed agent into the main
file.
"""

import asyncio
import contextlib
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Self
from urllib.parse import quote

from gpumgr.common.errors import CheckpointError
from gpumgr.common.files import sync_folder
from gpumgr.ledger.checkpoint import files, tables
from gpumgr.ledger.checkpoint.tables import Loaded, checksum
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Change

#: A function for the writer thread, and the future of its result; None ends the thread.
_Job = tuple[Callable[[], None], Future[None]] | None


class SqliteCheckpoint:
    """The durable state of the agent. `open` creates it; call `save` and `save_note` from one event loop, and `close` at the end."""

    def __init__(self, connection: sqlite3.Connection, path: Path, loaded: Loaded) -> None:
        self._connection, self._path, self._loaded = connection, path, loaded
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, folder: Path, *, outlive: Collection[str] = (), wall_clock: Callable[[], float] = time.time) -> Self:
        """Opens or creates the checkpoint in `folder` and reads it. Blocks for some milliseconds; call it only at the start.

        A corrupt file is renamed: then `load()` has `lost` and the new name of the file. Its readable notes with the keys `outlive` are
        copied into the new file. Raises CheckpointError if the folder can't be used, or if a newer gpumgr wrote the file.
        """
        path = files.prepare(folder)
        existed = path.stat().st_size > 0
        try:
            connection, loaded = _open(path, fresh=not existed)
        except files.CorruptError as error:
            notes, notes_lost = _intact_notes(path, outlive)
            aside = files.set_aside(path, wall_clock())
            files.prepare(folder)
            connection, _ = _open(path, fresh=True, notes=notes)
            loaded = Loaded(notes=notes, notes_lost=notes_lost, lost=True, set_aside=aside, why=str(error))
        return cls(connection, path, loaded)

    def load(self) -> Loaded:
        """The content of the checkpoint at `open`."""
        return self._loaded

    async def save(self, change: Change) -> None:
        """Makes the change durable. Raises CheckpointError; then the file is unchanged."""
        if change:
            await self._run(lambda: tables.write_change(self._connection, change))

    async def save_note(self, key: str, value: str, entries: Sequence[HistoryEntry] = ()) -> None:
        """Saves a text under a key, and entries of the history in the same transaction. Raises CheckpointError; then the file is
        unchanged."""

        def write() -> None:
            tables.write_note(self._connection, key, value)
            tables.write_entries(self._connection, entries)

        await self._run(write)

    async def close(self, timeout_seconds: float = 2.0) -> bool:
        """Finishes the requested writes and closes the file. Returns False if the disk was too slow: then the file is not closed yet."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    async def _run(self, work: Callable[[], None]) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpoint {self._path} is closed")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # if the caller is cancelled, it stops waiting, but the write is completed
        self._jobs.put((work, done))
        try:
            await asyncio.wrap_future(done)
        except sqlite3.Error as error:
            raise files.translate(error, self._path, "write") from error

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                _transact(self._connection, work)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


def _transact(connection: sqlite3.Connection, work: Callable[[], None]) -> None:
    """Runs `work` as one transaction, which is durable on return."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        work()
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _open(path: Path, *, fresh: bool, notes: Mapping[str, str] = MappingProxyType({})) -> tuple[sqlite3.Connection, Loaded]:
    """The connection and the content of the file; a new file gets `notes`. Raises files.CorruptError or CheckpointError."""
    files.check_header(path)
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
            raise files.CorruptError(f"the checkpoint {path} contradicts itself: {broken[0]}")
        return connection, loaded
    except sqlite3.Error as error:
        connection.close()
        raise files.translate(error, path, "open") from error
    except CheckpointError:
        connection.close()
        raise


def _intact_notes(path: Path, keys: Collection[str]) -> tuple[Mapping[str, str], bool]:
    """The notes of a corrupt file that have these keys and a correct checksum, and whether a missing note may have been in the damaged
    part.

    Reads a copy, so that the file stays unchanged. Raises nothing."""
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
    """The present content of the checkpoint in `folder`; `lost` is set if there is no file, or a file without tables.

    Raises CheckpointError for a file that is corrupt, newer than this gpumgr, or not readable.
    """
    path = folder / files.NAME
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
        raise files.translate(error, path, "read") from error
