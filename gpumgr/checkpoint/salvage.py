"""Reads the intact notes of a corrupt file: those with a correct checksum. It reads a copy, so that the file stays unchanged."""

import shutil
import sqlite3
import tempfile
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gpumgr.checkpoint.codec import checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """`lost`: a requested note is missing and may have been in the damaged part of the file."""

    notes: Mapping[str, str]
    lost: bool


def salvage_notes(path: Path, keys: Collection[str]) -> Salvaged:
    """The readable notes with these keys. Raises nothing."""
    notes: dict[str, str] = {}
    whole = True
    try:
        with tempfile.TemporaryDirectory(prefix="gpumgr-checkpoint-") as folder:
            for source in (path, path.with_name(f"{path.name}-wal")):
                if source.exists():
                    shutil.copyfile(source, Path(folder) / source.name)
            with closing(sqlite3.connect(Path(folder) / path.name, isolation_level=None)) as connection:
                for row in connection.execute("SELECT CAST(key AS BLOB), CAST(value AS BLOB), sum FROM notes"):
                    note = _sound(row)
                    if note is None:
                        whole = False
                    elif note[0] in keys:
                        notes[note[0]] = note[1]
    except (OSError, sqlite3.Error):
        whole = False
    return Salvaged(notes=notes, lost=not whole and notes.keys() < set(keys))


def _sound(row: tuple[bytes | None, bytes | None, int]) -> tuple[str, str] | None:
    key, value, sum_ = row
    try:
        note = (key or b"").decode(), (value or b"").decode()
    except UnicodeDecodeError:
        return None
    return note if sum_ == checksum(*note) else None
