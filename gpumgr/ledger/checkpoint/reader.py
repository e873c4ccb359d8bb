"""Reads the checkpoint with or without a running agent. It changes nothing and creates no file.

sqlite's read-only mode creates a missing -shm file, and needs the log (-wal) of a killed agent. Therefore:
no log: the main file is complete, and is read as immutable; log and -shm: read-only mode; a log alone: a private copy is read.
An agent that starts or stops between these checks changes the set of files, so a failed read is retried once.
"""

import contextlib
import shutil
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote

from gpumgr.common.errors import CheckpointError
from gpumgr.ledger.checkpoint import files, tables
from gpumgr.ledger.checkpoint.tables import Loaded


def read_checkpoint(folder: Path) -> Loaded:
    """The present content of the checkpoint in `folder`; `lost` is set if there is no file, or a file without tables.

    Raises CheckpointError for a file that is corrupt, newer than this gpumgr, or not readable.
    """
    path = folder / files.NAME
    with contextlib.suppress(OSError, CheckpointError):
        return _attempt(path)
    try:
        return _attempt(path)
    except FileNotFoundError:
        return Loaded(lost=True, why=f"there is no checkpoint at {path}")
    except OSError as error:
        raise CheckpointError(f"can't read the checkpoint {path}: {error.strerror or error}") from error


def _attempt(path: Path) -> Loaded:
    """Raises FileNotFoundError or another OSError, or CheckpointError."""
    log, shared = path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")
    path.stat()
    if not log.exists() or log.stat().st_size == 0:
        return _read(path, "immutable=1")
    if shared.exists():
        return _read(path, "mode=ro")
    with tempfile.TemporaryDirectory(prefix="gpumgr-checkpoint-") as copy:
        for file in (path, log):
            shutil.copyfile(file, Path(copy) / file.name)
        return _read(Path(copy) / path.name, "mode=rw")


def _read(path: Path, mode: str) -> Loaded:
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=2.0)
        ) as connection:
            if tables.is_empty(connection):
                return Loaded(lost=True, why=f"the checkpoint {path} holds no tables")
            tables.check(connection, path)
            return tables.read(connection)
    except sqlite3.Error as error:
        raise files.translate(error, path, "read") from error
