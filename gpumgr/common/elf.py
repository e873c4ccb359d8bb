"""Reads ELF files: machine, SONAME, NEEDED, and exported symbols. Every offset and count is checked.

Source: System V ABI, chapters 4 and 5.
"""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gpumgr.common.errors import GpumgrError

#: (offset, count) -> exactly `count` bytes. Raises ElfError if the file is shorter.
Read = Callable[[int, int], bytes]

#: A shared library, or a position-independent program.
ET_DYN: Final = 3

_MAGIC: Final = b"\x7fELF"
_IDENT_BYTES: Final = 16
_ET_EXEC = 2
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 0, 1, 5, 10, 14
_SHT_DYNSYM = 11
_MAX_ENTRIES: Final = 4096
_MAX_PART_BYTES: Final = 1 << 20
_MAX_NAME_BYTES: Final = 4096
#: The machine as `uname -m` prints it -> `Elf.machine`.
KERNEL_NAMES: Final = {"x86_64": "x86-64", "aarch64": "aarch64"}
_MACHINES: Final = {
    (62, 64): "x86-64",
    (62, 32): "x32",
    (3, 32): "i386",
    (183, 64): "aarch64",
    (40, 32): "arm",
    (21, 64): "ppc64le",
}


class ElfError(GpumgrError):
    """The file is no ELF program or library, or is damaged. The message continues a sentence that begins with the file's name."""


class Table(NamedTuple):
    """`offset` is in bytes from the start of the file."""

    offset: int
    entry_bytes: int
    entries: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` is 32 or 64, `order` is "<" (little-endian) or ">". `kind` is ET_DYN or another file type of ELF."""

    bits: int
    order: str
    machine: str
    kind: int
    segments: Table
    sections: Table


class Elf(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    soname: str | None = None
    needed: tuple[str, ...] = ()


class _Segment(NamedTuple):
    kind: int
    offset: int
    address: int
    size: int


def read_elf(path: Path) -> Elf:
    """Raises ElfError unless the file is a well-formed program or library that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _parse(_reader(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ElfError(f"can't be read: {error.strerror or error}") from error


def read_header(descriptor: int) -> Header:
    """Raises OSError, and ElfError if the file is not an ELF file."""
    return _header(_reader(descriptor))


def read_exports(descriptor: int) -> frozenset[str]:
    """The dynamic symbols that the file defines for others; empty if the file has no section headers. Raises ElfError, OSError."""
    read = _reader(descriptor)
    header = _header(read)
    wide, order = header.bits == 64, header.order
    section = struct.Struct(f"{order}IIQQQQIIQQ" if wide else f"{order}10I")
    symbol = struct.Struct(f"{order}IBBHQQ" if wide else f"{order}IIIBBH")
    found = set()
    sections = [_unpack(section, read, at) for at in _entries(header.sections, section, "section")]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SHT_DYNSYM:
            continue
        if link >= len(sections):
            raise ElfError("has symbols, but no string table")
        names = _part(read, *sections[link][4:6])
        for name, *values in symbol.iter_unpack(_part(read, offset, size // symbol.size * symbol.size)):
            info, _, place = values[:3] if wide else values[2:]
            if place and info >> 4:  # defined, and not local
                text, end, _ = names[name:].partition(b"\0")
                if not end:
                    raise ElfError("has a name outside of its string table")
                found.add(text.decode(errors="replace"))
    return frozenset(found)


def _reader(descriptor: int) -> Read:
    total = os.fstat(descriptor).st_size

    def read(offset: int, count: int) -> bytes:
        content = os.pread(descriptor, count, min(offset, total))
        if offset > total or len(content) < count:
            raise ElfError(f"ends at byte {total}, before the {count} bytes at {offset} that it refers to")
        return content

    return read


def _header(read: Read) -> Header:
    if read(0, len(_MAGIC)) != _MAGIC:
        raise ElfError("is not an ELF file")
    ident = read(0, _IDENT_BYTES)
    if ident[4] not in (1, 2) or ident[5] not in (1, 2):
        raise ElfError("is an ELF file of no known class or byte order")
    bits = 32 * ident[4]
    order = "<" if ident[5] == 1 else ">"
    layout = struct.Struct(f"{order}HHI{'QQQ' if bits == 64 else 'III'}IHHHHHH")
    kind, machine, _, _, segments_at, sections_at, _, _, *sizes, _ = _unpack(layout, read, _IDENT_BYTES)
    return Header(
        bits=bits,
        order=order,
        machine=_MACHINES.get((machine, bits), f"ELF machine {machine}"),
        kind=kind,
        segments=Table(segments_at, *sizes[:2]),
        sections=Table(sections_at, *sizes[2:]),
    )


def _parse(read: Read) -> Elf:
    header = _header(read)
    if header.kind not in (_ET_EXEC, ET_DYN):
        raise ElfError("is an ELF file, but neither a program nor a library")
    segments = list(_segments(read, header))
    soname, needed = _dynamic(read, header, segments)
    return Elf(machine=header.machine, soname=soname, needed=needed)


def _unpack(layout: struct.Struct, read: Read, offset: int) -> tuple[int, ...]:
    return layout.unpack(read(offset, layout.size))


def _entries(table: Table, layout: struct.Struct, what: str) -> range:
    if table.entries > _MAX_ENTRIES or (table.entries and table.entry_bytes < layout.size):
        raise ElfError(f"has an invalid {what} header")
    return range(table.offset, table.offset + table.entries * table.entry_bytes, table.entry_bytes or 1)


def _segments(read: Read, header: Header) -> Iterator[_Segment]:
    wide = header.bits == 64
    layout = struct.Struct(f"{header.order}IIQQQQ" if wide else f"{header.order}IIIIII")
    for at in _entries(header.segments, layout, "program"):
        values = _unpack(layout, read, at)
        # Fields with 64 bits: type, flags, offset, address, physical address, size in the file. With 32 bits the flags are later.
        kind, offset, address, size = (values[0], *values[2:4], values[5]) if wide else (*values[:3], values[4])
        yield _Segment(kind, offset, address, size)


def _dynamic(read: Read, header: Header, segments: list[_Segment]) -> tuple[str | None, tuple[str, ...]]:
    """SONAME and NEEDED. A static program has neither."""
    segment = next((each for each in segments if each.kind == _PT_DYNAMIC), None)
    if segment is None:
        return None, ()
    layout = struct.Struct(f"{header.order}QQ" if header.bits == 64 else f"{header.order}II")
    content = _part(read, segment.offset, segment.size)
    entries: list[tuple[int, int]] = []
    for tag, value in layout.iter_unpack(content[: len(content) // layout.size * layout.size]):
        if tag == _DT_NULL:
            break
        entries.append((tag, value))
    first = dict(reversed(entries))
    wanted = [(tag, value) for tag, value in entries if tag in (_DT_SONAME, _DT_NEEDED)]
    if not wanted:
        return None, ()
    if _DT_STRTAB not in first or _DT_STRSZ not in first:
        raise ElfError("has names, but no string table")
    start, size = _offset_of(first[_DT_STRTAB], segments), first[_DT_STRSZ]
    names = [(tag, _name(read, start, size, index)) for tag, index in wanted]
    soname = next((name for tag, name in names if tag == _DT_SONAME), None)
    return soname or None, tuple(name for tag, name in names if tag == _DT_NEEDED)


def _part(read: Read, offset: int, size: int) -> bytes:
    if size > _MAX_PART_BYTES:
        raise ElfError(f"has a part of {size} bytes, and the limit is {_MAX_PART_BYTES}")
    return read(offset, size)


def _offset_of(address: int, segments: list[_Segment]) -> int:
    for segment in segments:
        if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    raise ElfError("has its names outside of the loaded segments")


def _name(read: Read, start: int, size: int, index: int) -> str:
    if index >= size:
        raise ElfError("has a name outside of its string table")
    text, end, _ = read(start + index, min(size - index, _MAX_NAME_BYTES)).partition(b"\0")
    try:
        name = text.decode("ascii")
    except UnicodeDecodeError as error:
        raise ElfError("has a name that is not ASCII") from error
    if not end or not name.isprintable():
        raise ElfError("has an unterminated or unprintable name")
    return name
