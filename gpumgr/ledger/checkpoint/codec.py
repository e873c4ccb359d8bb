"""Encodes allocations and history entries as rows: JSON with bit masks in hex, and a checksum over the record.

sqlite's integrity check covers the structure of the file, not its content; the checksum finds a flipped bit in a row.
"""

import zlib
from dataclasses import fields, replace
from typing import Any, Final

import msgspec

from gpumgr.common.foreign_text import convert, decode_json
from gpumgr.common.units import ALL_RESOURCES, Resource
from gpumgr.ledger.checkpoint.files import CorruptError
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import Masks
from gpumgr.ledger.ledger import Allocation, AllocationId


class CorruptRowError(CorruptError):
    """A row differs from what was written."""


_FIELDS: Final = {field.name for field in fields(Allocation)} - {"id", "device_ids"}
_encoder = msgspec.json.Encoder()
_UNSET: Final = Allocation(id="")


def encode_allocation(allocation: Allocation) -> tuple[AllocationId, str, int]:
    """(id, record, checksum): a row. The record has the allocation's fields that are not empty."""
    row = {name: value for name in _FIELDS if (value := getattr(allocation, name)) != getattr(_UNSET, name)}
    if allocation.device_ids:
        row["device_ids"] = {
            resource: {gpu: format(mask, "x") for gpu, mask in masks.items()} for resource, masks in allocation.device_ids.items()
        }
    record = _encoder.encode(row).decode()
    return allocation.id, record, checksum(allocation.id, record)


def decode_allocation(allocation_id: AllocationId, record: str, sum_: int) -> Allocation:
    """The allocation of a row. Raises CorruptRowError, which names it."""
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
        raise CorruptRowError(f"the row of allocation {allocation_id!r} can't be read: {error}") from error


def encode_entry(entry: HistoryEntry) -> tuple[int, str, int]:
    """(number, record, checksum): a row."""
    record = _encoder.encode(entry).decode()
    return entry.number, record, checksum(str(entry.number), record)


def decode_entry(number: int, record: bytes, sum_: int) -> HistoryEntry:
    """The entry of a row. Raises CorruptRowError for any record that is not an entry."""
    try:
        if sum_ != checksum(str(number), record.decode()):
            raise ValueError("its checksum is wrong")
        return decode_json(record, HistoryEntry)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRowError(f"entry {number} of the history can't be read: {error}") from error


def checksum(*texts: str) -> int:
    """CRC-32 of the texts, each with a terminating NUL."""
    result = 0
    for text in texts:
        result = zlib.crc32(text.encode() + b"\0", result)
    return result
