"""Encodes allocations and history entries as rows: JSON with bit masks in hex, and a checksum over the record.

sqlite's integrity check covers the structure of the file, not its content; the checksum finds a flipped bit in a row.
"""

import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

import msgspec

from gpumgr.common.foreign_text import convert, decode_json
from gpumgr.common.units import ALL_RESOURCES, BLOCK_MEBIBYTES, Resource
from gpumgr.ledger.checkpoint.files import CorruptError
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry, Masks
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


def decode_allocation(gpu_registry: GpuRegistry, allocation_id: AllocationId, record: str, sum_: int) -> Allocation:
    """The allocation of a row; for one of schema 2 the amounts are computed from its ids. Raises CorruptRowError, which names it."""
    try:
        if sum_ != checksum(allocation_id, record):
            raise ValueError("its checksum is wrong")
        row = decode_json(record, dict[str, Any])
        # Schema 2 has a list of GPUs, and the ids as `cores` and `blocks`.
        gpus = row.pop("gpus", ())
        ids = row.pop("device_ids", None) or {"core": row.pop("cores", {}), "memory": row.pop("blocks", {})}
        if unknown := row.keys() - _FIELDS:
            raise ValueError(f"it has the field {min(unknown)[:64]!r}")
        device_ids: dict[Resource, Masks] = {
            resource: {gpu: int(mask, 16) for gpu, mask in ids[resource].items()}
            for resource in ALL_RESOURCES
            if ids.get(resource)
        }
        if not isinstance(gpus, Mapping):
            return convert({"id": allocation_id, **row}, Allocation).with_ids(gpu_registry, device_ids, gpus)
        whole = convert({"id": allocation_id, "gpus": gpus, **row}, Allocation)
        return replace(whole, device_ids=device_ids)
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
        entry = decode_json(record, HistoryEntry)
        return entry if b"memory_blocks_free" not in record else _of_schema_2(entry, record)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRowError(f"entry {number} of the history can't be read: {error}") from error


def checksum(*texts: str) -> int:
    """CRC-32 of the texts, each with a terminating NUL."""
    result = 0
    for text in texts:
        result = zlib.crc32(text.encode() + b"\0", result)
    return result


def _of_schema_2(entry: HistoryEntry, record: bytes) -> HistoryEntry:
    """Converts an entry of schema 2, which has a candidate's free memory in blocks."""
    blocks = [candidate.get("memory_blocks_free", 0) for candidate in decode_json(record, dict[str, Any])["candidates"]]
    candidates = zip(entry.candidates, blocks, strict=True)
    return replace(entry, candidates=tuple(replace(c, memory_mebibytes_free=n * BLOCK_MEBIBYTES) for c, n in candidates))
