"""The tables of the checkpoint: creates, checks, reads and writes them on a given connection. The caller of `create` and of the `write_`
functions begins and ends the transaction. Notes are JSON texts that the agent keeps over a restart besides the ledger."""

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import CheckpointError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json
from gpumgr.common.units import ALL_RESOURCES, Resource
from gpumgr.ledger.history import HISTORY_ENTRIES, HistoryEntry
from gpumgr.ledger.ids import GpuRegistry, Masks, RegisteredGpu
from gpumgr.ledger.ledger import Allocation, AllocationId, Change, Ledger

T = TypeVar("T")

_FIELDS: Final = {*Allocation.__struct_fields__} - {"id", "device_ids"}
_encoder = msgspec.json.Encoder()
_UNSET: Final = Allocation(id="")

#: The checkpoint has this note while a lost ledger is not completely rebuilt, so that an agent that starts then continues the rebuild.
LOST_NOTE: Final = "ledger_lost"
#: A remedy for `decode_note`.
DELETE_IT: Final = ", or delete its row from the table notes of the checkpoint's database"


class CorruptError(CheckpointError):
    """The file's content can't be trusted."""


def encode_allocation(allocation: Allocation) -> tuple[AllocationId, str, int]:
    """(id, record, checksum). The record lacks empty fields."""
    row = {name: value for name in _FIELDS if (value := getattr(allocation, name)) != getattr(_UNSET, name)}
    if allocation.device_ids:
        row["device_ids"] = {
            resource: {gpu: format(mask, "x") for gpu, mask in masks.items()} for resource, masks in allocation.device_ids.items()
        }
    record = _encoder.encode(row).decode()
    return allocation.id, record, checksum(allocation.id, record)


def decode_allocation(allocation_id: AllocationId, record: str, sum_: int) -> Allocation:
    """Raises CorruptError, which names the row."""
    try:
        if sum_ != checksum(allocation_id, record):
            raise ValueError("its checksum is wrong")
        row = decode_json(record, dict[str, Any])
        ids = row.pop("device_ids", {})
        if unknown := row.keys() - _FIELDS:
            raise ValueError(f"it has the field {min(unknown)[:64]!r}")
        device_ids: dict[Resource, Masks] = {
            resource: {gpu: int(mask, 16) for gpu, mask in ids[resource].items()}
            for resource in ALL_RESOURCES
            if ids.get(resource)
        }
        return replace(convert({"id": allocation_id, **row}, Allocation), device_ids=device_ids)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CorruptError(f"the row of allocation {allocation_id!r} can't be read: {error}") from error


def decode_entry(number: int, record: bytes, sum_: int) -> HistoryEntry | None:
    """None for any record that is not an entry."""
    try:
        return decode_json(record, HistoryEntry) if sum_ == checksum(str(number), record.decode()) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def checksum(*texts: str) -> int:
    """CRC-32 of the texts, each with a terminating NUL. sqlite checks only the structure of its file; this checksum finds a flipped
    bit in a row."""
    result = 0
    for text in texts:
        result = zlib.crc32(text.encode() + b"\0", result)
    return result


#: Increase it with every change that another version of gpumgr would misread.
SCHEMA_VERSION: Final = 8

_CREATE: Final = (
    "CREATE TABLE schema (version INTEGER NOT NULL)",
    "CREATE TABLE gpus (place INTEGER PRIMARY KEY, record TEXT NOT NULL, sum INTEGER NOT NULL)",
    "CREATE TABLE allocations (id TEXT PRIMARY KEY, record TEXT NOT NULL, sum INTEGER NOT NULL)",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER NOT NULL)",
    # grant_of: the allocation, if the entry records its grant
    "CREATE TABLE history (number INTEGER PRIMARY KEY, grant_of TEXT, record TEXT NOT NULL, sum INTEGER NOT NULL)",
)
#: Deletes all entries but the newest N and the grants of existing allocations.
_PRUNE: Final = (
    "DELETE FROM history WHERE number <= (SELECT number FROM history ORDER BY number DESC LIMIT 1 OFFSET ?) "
    "AND (grant_of IS NULL OR grant_of NOT IN (SELECT id FROM allocations))"
)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a checkpoint. `history` is in order of time; `unreadable` counts its entries that were skipped.

    `lost`: there is no valid ledger, so it must be rebuilt from the kubelet's state; `why` gives the cause. A corrupt file was renamed to
    `set_aside`. Then `notes` has only the notes that outlive a lost ledger, and `notes_lost` says whether some of them may be missing.
    """

    ledger: Ledger = msgspec.field(default_factory=Ledger)
    notes: Mapping[str, str] = msgspec.field(default_factory=dict)
    notes_lost: bool = False
    history: tuple[HistoryEntry, ...] = ()
    unreadable: int = 0
    lost: bool = False
    set_aside: Path | None = None
    why: str | None = None


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the file is new, or its creation was interrupted."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()


def create(connection: sqlite3.Connection, notes: Mapping[str, str]) -> None:
    for statement in _CREATE:
        connection.execute(statement)
    connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
    for key, value in notes.items():
        write_note(connection, key, value)


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises CorruptError if the file is damaged, or has another program's tables or an older schema; CheckpointError if a newer gpumgr
    wrote it."""
    results = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
    if results != ["ok"]:
        raise CorruptError(f"sqlite's integrity check reports: {'; '.join(map(str, results))}")
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'schema'").fetchone():
        raise CorruptError("the file has tables, but they are not gpumgr's")
    versions = [row[0] for row in connection.execute("SELECT version FROM schema")]
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < SCHEMA_VERSION:
        raise CorruptError(f"the schema version is {versions}; this gpumgr reads {SCHEMA_VERSION} only")
    if versions[0] > SCHEMA_VERSION:
        raise CheckpointError(
            f"the checkpoint {path} was written by a newer gpumgr (schema {versions[0]}, this one reads {SCHEMA_VERSION} only): "
            "start that version again, or move the file away: the ledger is then rebuilt from the kubelet's state"
        )


def read(connection: sqlite3.Connection) -> Loaded:
    """Reads all tables at one instant. Raises CorruptError with the cause, which names the row where possible."""
    connection.execute("BEGIN")
    try:
        gpu_registry = _gpus(connection)
        rows = connection.execute("SELECT id, record, sum FROM allocations ORDER BY rowid")
        allocations = {row[0]: decode_allocation(*row) for row in rows}
        notes = dict(_note(row) for row in connection.execute("SELECT key, value, sum FROM notes ORDER BY key"))
        rows = connection.execute("SELECT number, CAST(record AS BLOB), sum FROM history ORDER BY number")
        entries = [decode_entry(*row) for row in rows]
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"a row holds values of a wrong type: {error}") from error
    finally:
        connection.execute("ROLLBACK")
    history = tuple(entry for entry in entries if entry is not None)
    return Loaded(ledger=Ledger(gpu_registry, allocations), notes=notes, history=history, unreadable=len(entries) - len(history))


def write_change(connection: sqlite3.Connection, change: Change) -> None:
    if change.gpu_registry is not None:
        connection.execute("DELETE FROM gpus")
        _write_gpus(connection, change.gpu_registry)
    connection.executemany("DELETE FROM allocations WHERE id = ?", [(allocation_id,) for allocation_id in change.drop])
    connection.executemany(
        "INSERT INTO allocations VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record, sum = excluded.sum",
        [encode_allocation(allocation) for allocation in change.put],
    )
    write_entries(connection, change.entries)
    if change.entries and not change.put:  # a grant must be fast, so only other changes prune the history
        connection.execute(_PRUNE, (HISTORY_ENTRIES,))


def write_entries(connection: sqlite3.Connection, entries: Sequence[HistoryEntry]) -> None:
    connection.executemany("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", map(_entry_row, entries))


def write_note(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (key, value, checksum(key, value)))


def _entry_row(entry: HistoryEntry) -> tuple[int, str | None, str, int]:
    record = _encoder.encode(entry).decode()
    return entry.number, entry.id if entry.what == "granted" else None, record, checksum(str(entry.number), record)


def _gpus(connection: sqlite3.Connection) -> GpuRegistry:
    gpus = []
    for place, record, sum_ in connection.execute("SELECT place, record, sum FROM gpus ORDER BY place"):
        if sum_ != checksum(str(place), record):
            raise CorruptError(f"the row of GPU {place} can't be read: its checksum is wrong")
        gpus.append(decode_json(record, RegisteredGpu))
    return GpuRegistry(tuple(gpus))


def _write_gpus(connection: sqlite3.Connection, gpu_registry: GpuRegistry) -> None:
    records = [_encoder.encode(gpu).decode() for gpu in gpu_registry.gpus]
    rows = [(place, record, checksum(str(place), record)) for place, record in enumerate(records)]
    connection.executemany("INSERT INTO gpus VALUES (?, ?, ?)", rows)


def _note(row: tuple[str, str, int]) -> tuple[str, str]:
    key, value, sum_ = row
    if sum_ != checksum(key, value):
        raise CorruptError(f"the row of note {key!r} can't be read: its checksum is wrong")
    return key, value


def encode_note(value: object) -> str:
    """Equal values have equal texts."""
    return msgspec.json.encode(value, order="deterministic").decode()


def decode_note(notes: Mapping[str, str], key: str, kind: type[T], *, remedy: str = "") -> T:
    """The note with this key; a missing note counts as `{}`. Raises CheckpointError for a note that can't be read; the error's text ends
    with `remedy`."""
    try:
        return decode_json(notes.get(key) or "{}", kind)
    except UnreadableText as error:
        raise CheckpointError(
            f"the checkpoint's note {key} can't be read ({error}): start the version of gpumgr that wrote it{remedy}"
        ) from error
