"""Protobuf's wire format: a strict reader that skips unknown fields, and a writer.

A message is a series of (tag, payload). tag = field number << 3 | wire type; wire types are 0 varint, 1 eight bytes, 2 length and bytes, 5
four bytes. Source: the public protobuf encoding guide.

Generated code takes far more CPU ("Decisions" in docs/design.md), so it is used only for short messages.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, Self, TypeVar

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

#: 64 bits are ten groups of seven bits.
_MAX_SHIFT: Final = 63


class WireError(ValueError):
    """The bytes are not a valid protobuf message. The message says why."""


class Generated(Protocol):
    """A message class that `make proto` generated."""

    def parse(self, data: bytes) -> Self: ...


M = TypeVar("M", bound=Generated)


def parse(message_type: type[M], data: bytes) -> M:
    """Raises WireError. The generated code accepts truncated fields, so the bounds of the outermost fields are checked first."""
    for _ in spans(data, 0, len(data)):
        pass
    try:
        return message_type().parse(data)
    except Exception as error:  # the generated code raises errors of many types
        raise WireError(f"{message_type.__name__}: {type(error).__name__}: {error}") from error


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The varint at `at`, and the offset after it. Raises WireError beyond `end` or 64 bits."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise WireError(f"a number at byte {at} has more than 64 bits")
    raise WireError(f"the message is truncated: a number runs beyond byte {end}")


def skip(data: bytes, at: int, end: int, wire_type: int) -> int:
    """The offset after the payload at `at`. Raises WireError if it is beyond `end` or `wire_type` does not exist."""
    if wire_type == BYTES:
        size, at = read_varint(data, at, end)
        at += size
    elif wire_type == VARINT:
        _, at = read_varint(data, at, end)
    elif wire_type == FIXED64:
        at += 8
    elif wire_type == FIXED32:
        at += 4
    else:
        raise WireError(f"wire type {wire_type} before byte {at} does not exist")
    if at > end:
        raise WireError(f"the message is truncated: a field runs beyond byte {end}")
    return at


def spans(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of every length-delimited field of the message at start..end. Raises WireError."""
    at = start
    while at < end:
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = read_varint(data, at - 1, end)
        if tag < 8:
            raise WireError(f"field number 0 before byte {at} does not exist")
        if tag & 7 != BYTES:
            at = skip(data, at, end, tag & 7)
            continue
        # Nearly every length is one byte. `read_varint` reads a longer one, and raises WireError if no byte is left.
        size = data[at] if at < end else 0x80
        at += 1
        if size > 0x7F:
            size, at = read_varint(data, at - 1, end)
        if at + size > end:
            raise WireError(f"the message is truncated: a field runs beyond byte {end}")
        yield tag >> 3, at, at + size
        at += size


def scan(data: bytes, start: int, end: int, texts: dict[int, list[str]]) -> dict[int, int]:
    """Reads the message at start..end in one pass. `texts`: number of a string field -> the list to which its strings are appended. Errors
    give byte offsets from the message's start.

    Returns the varint fields by number; the last one counts, as in protobuf. Other fields are skipped. Raises WireError.
    """
    if start > 0 or end < len(data):  # the outer message may be long: decode only this part
        data, start, end = data[start:end], 0, end - start
    numbers: dict[int, int] = {}
    wanted = {number << 3 | BYTES: found.append for number, found in texts.items()}
    # One decoding of the whole message is faster than one for each string. Strings that are not ASCII are decoded again at the end.
    latin_1 = data.decode("latin-1")
    at = start
    while at < end:
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = read_varint(data, at - 1, end)
        if tag in wanted:
            size = data[at] if at < end else 0x80
            at += 1
            if size > 0x7F:
                size, at = read_varint(data, at - 1, end)
            first = at
            at += size
            if at > end:
                raise WireError(f"the message is truncated: a text runs beyond byte {end}")
            wanted[tag](latin_1[first:at])
        elif tag < 8:
            raise WireError(f"field number 0 before byte {at} does not exist")
        elif tag & 7 == VARINT:
            numbers[tag >> 3], at = read_varint(data, at, end)
        else:
            at = skip(data, at, end, tag & 7)
    for found in texts.values():
        if not "".join(found).isascii():
            try:
                found[:] = [each.encode("latin-1").decode() for each in found]
            except UnicodeDecodeError as error:
                raise WireError(f"a text between the bytes {start} and {end} is not UTF-8") from error
    return numbers


def texts(data: bytes, start: int, end: int) -> list[str]:
    """The strings of field 1; other fields are skipped. Raises WireError."""
    # Nearly every message has only short ASCII strings, and for these `re` and `join`, which are C code, are faster than `scan`. If the
    # found strings, encoded again, differ from the message, `scan` reads it.
    ascii_text = data[start:end].decode("latin-1")
    found: list[str] = _SHORT_TEXTS.findall(ascii_text)
    if ascii_text.isascii() and "".join([_HEADS[len(each)] + each for each in found]) == ascii_text:
        return found
    found = []
    scan(data, start, end, {1: found})
    return found


def text(data: bytes, start: int, end: int) -> str:
    """Raises WireError if the string is not UTF-8, which proto3 demands."""
    try:
        return data[start:end].decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the text at byte {start} is not UTF-8") from error


def varint(value: int) -> bytes:
    """`value` (0 or more) as a varint."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


_SHORT: Final = tuple(bytes([size]) for size in range(0x80))


def field(number: int, payload: bytes) -> bytes:
    """`number` is 1 to 15, so that the tag is one byte."""
    size = len(payload)
    return _TAGS[number] + (_SHORT[size] if size < 0x80 else varint(size)) + payload


def text_field(number: int, value: str) -> bytes:
    """proto3 writes nothing for the empty string."""
    return field(number, value.encode()) if value else b""


def text_fields(values: Iterable[str]) -> bytes:
    """Repeated strings in field 1."""
    values = list(values)
    try:
        return "".join([_HEADS[len(each)] + each for each in values]).encode("ascii")
    except (IndexError, UnicodeEncodeError):  # a long string, or a string with more bytes than characters
        return b"".join([field(1, each.encode()) for each in values])


#: Length -> tag and length of a short string in field 1. `_SHORT_TEXTS` finds such fields, but may match other bytes.
_HEADS: Final = tuple(f"\n{chr(size)}" for size in range(0x80))
_SHORT_TEXTS: Final = re.compile("\n[\0-\x7f]([^\n]{0,127})")
_TAGS: Final = tuple(bytes([number << 3 | BYTES]) for number in range(16))
