"""Small ELF libraries made by hand, of machines that no compiler at hand builds for."""

import struct
from collections.abc import Sequence

#: machine -> (number, bits)
MACHINES = {"x86-64": (62, 64), "x32": (62, 32), "i386": (3, 32), "aarch64": (183, 64), "arm": (40, 32)}


def elf(
    machine: str = "x86-64", *, soname: str | None = None, needed: Sequence[str] = (), order: str = "<", kind: int = 3
) -> bytes:
    """Header, two program headers (load, dynamic), names, dynamic section; loaded at address 0x1000."""
    number, bits = MACHINES[machine]
    wide = bits == 64
    word = "Q" if wide else "I"
    header_bytes, segment_bytes = (64, 56) if wide else (52, 32)
    address = 0x1000
    names_at = header_bytes + 2 * segment_bytes
    names, places = b"\0", {}
    for name in (*needed, *([soname] if soname is not None else [])):
        places[name] = len(names)
        names += name.encode() + b"\0"
    names += b"\0" * (-len(names) % 8)
    entries = [(5, address + names_at), (10, len(names)), *((1, places[name]) for name in needed)]
    entries += [(14, places[soname])] if soname is not None else []
    dynamic = b"".join(struct.pack(f"{order}{word}{word}", *entry) for entry in (*entries, (0, 0)))
    total = names_at + len(names) + len(dynamic)

    def segment(segment_kind: int, offset: int, size: int) -> bytes:
        if wide:
            return struct.pack(f"{order}IIQQQQQQ", segment_kind, 4, offset, address + offset, 0, size, size, 4)
        return struct.pack(f"{order}IIIIIIII", segment_kind, offset, address + offset, 0, size, size, 4, 4)

    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    header = struct.pack(
        f"{order}HHI{word * 3}I6H", kind, number, 1, 0, header_bytes, 0, 0, header_bytes, segment_bytes, 2, 0, 0, 0
    )
    segments = segment(1, 0, total) + segment(2, names_at + len(names), len(dynamic))
    return ident + header + segments + names + dynamic
