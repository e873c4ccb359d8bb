"""Allocations and the history's entries as rows: JSON with bit masks in hex, and a checksum over what the row says.

sqlite's own integrity check covers its structure, not its content; the checksum finds a flipped bit in a row.
"""

import zlib

import msgspec

from gpumgr.allocator.history import Entry
from gpumgr.allocator.ids import Masks
from gpumgr.allocator.ledger import Allocation, AllocationId
from gpumgr.checkpoint.files import CorruptError


class CorruptRowError(CorruptError):
    """A row does not say what was once written there."""


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pod: tuple[str, str] | None = None
    uid: str | None = None
    container: str | None = None
    init: bool = False
    cores: dict[str, str] = {}
    blocks: dict[str, str] = {}
    gpus: tuple[str, ...] = ()
    granted_at: float = 0.0
    why: str = ""
    anonymous: bool = False
    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False


_decoder = msgspec.json.Decoder(_Row)
_entry_decoder = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder()


def encode_allocation(allocation: Allocation) -> tuple[AllocationId, str, int]:
    """(id, record, checksum): one row."""
    record = _encoder.encode(
        _Row(
            pod=allocation.pod,
            uid=allocation.uid,
            container=allocation.container,
            init=allocation.init,
            cores=_to_hex(allocation.cores),
            blocks=_to_hex(allocation.blocks),
            gpus=allocation.gpus,
            granted_at=allocation.granted_at,
            why=allocation.why,
            anonymous=allocation.anonymous,
            mechanisms=allocation.mechanisms,
            exemption=allocation.exemption,
            cdi=allocation.cdi,
        )
    ).decode()
    return allocation.id, record, checksum(allocation.id, record)


def decode_allocation(allocation_id: AllocationId, record: str, sum_: int) -> Allocation:
    """The allocation of a row. Raises CorruptRowError that names it."""
    try:
        if sum_ != checksum(allocation_id, record):
            raise ValueError("its checksum is wrong")
        row = _decoder.decode(record)
        return Allocation(
            id=allocation_id,
            pod=row.pod,
            uid=row.uid,
            container=row.container,
            init=row.init,
            cores=_from_hex(row.cores),
            blocks=_from_hex(row.blocks),
            gpus=row.gpus,
            granted_at=row.granted_at,
            why=row.why,
            anonymous=row.anonymous,
            mechanisms=row.mechanisms,
            exemption=row.exemption,
            cdi=row.cdi,
        )
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRowError(f"the row of allocation {allocation_id!r} can't be read: {error}") from error


def encode_entry(entry: Entry) -> tuple[int, str, int]:
    """(number, record, checksum): one row."""
    record = _encoder.encode(entry).decode()
    return entry.number, record, checksum(str(entry.number), record)


def decode_entry(number: int, record: bytes, sum_: int) -> Entry:
    """The entry of a row, whatever its record is. Raises CorruptRowError."""
    try:
        if sum_ != checksum(str(number), record.decode()):
            raise ValueError("its checksum is wrong")
        return _entry_decoder.decode(record)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRowError(f"entry {number} of the history can't be read: {error}") from error


def checksum(*texts: str) -> int:
    """CRC-32 of the texts, each with its end marked."""
    result = 0
    for text in texts:
        result = zlib.crc32(text.encode() + b"\0", result)
    return result


def _to_hex(masks: Masks) -> dict[str, str]:
    return {gpu: format(mask, "x") for gpu, mask in masks.items()}


def _from_hex(masks: dict[str, str]) -> dict[str, int]:
    return {gpu: int(mask, 16) for gpu, mask in masks.items()}
