"""Reads a topology from the text of `nvidia-smi topo -m`.

A cell is X (the GPU itself), a PCIe level (SYS, NODE, PHB, PXB, PIX, PSB), `NVn` for n NVLinks, or `NVn+LEVEL`. A plain `NVn`, SOC (the old
spelling) and N/A (not known) count as SYS, the farthest level.
"""

import re
from functools import lru_cache
from typing import Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.placement.devices import Level, Link, Topology

MAX_GPUS: Final = 64
_LEVELS: Final[dict[str, Level]] = {**{level.name: level for level in Level}, "SOC": Level.SYS, "N/A": Level.SYS}
_NVLINK: Final = re.compile(r"NV([1-9][0-9]{0,2})(?:\+([A-Z]+))?")
_ALLOWED: Final = "X (itself), SYS, NODE, PHB, PXB, PIX, PSB, SOC, N/A, NVn or NVn+LEVEL"

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU_NAME: Final = re.compile(r"GPU([0-9]+)")
_AFFINITY: Final = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
# Some versions of nvidia-smi print no tab after a name or a cell that fills its column: GPU0GPU1, NODENODE.
_GLUED_NAMES: Final = re.compile(r"(?:GPU|NIC)[0-9]+|mlx[0-9]+_(?:bond_?)?[0-9]+")
_GLUED_CELLS: Final = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|SOC|NV[0-9]+")


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A network card. `nearest`: the indices of the GPUs that are closest to the card (empty: not reported)."""

    name: str
    nearest: tuple[int, ...]


class ParsedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """`labels` and `numa_affinity` have one entry for each GPU. A NUMA node is None if none or several are reported."""

    topology: Topology
    labels: tuple[str, ...]
    nics: tuple[Nic, ...] = ()
    numa_affinity: tuple[int | None, ...] = ()


@lru_cache(maxsize=64)
def parse_topology(text: str) -> ParsedTopology:
    """Reads the text of `nvidia-smi topo -m`; lines before its header and after its last GPU row are ignored. Raises InputError, with the
    line and the column if they are known."""
    lines = [(number, _ANSI.sub("", line).strip()) for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1)]
    start = next((position for position, (_, line) in enumerate(lines) if _GPU_NAME.match(line)), None)
    if start is None:
        raise InputError("no header line with GPU0, GPU1, ... found: expected the text that `nvidia-smi topo -m` prints")
    header = _read_header(*lines[start])
    rows = [_read_row(header, number, line) for number, line in _gpu_lines(header, lines[start + 1 :])]
    topology = _build(rows)
    return ParsedTopology(
        topology=topology,
        labels=header.gpus,
        nics=tuple(_nic(name, [row.nics[column] for row in rows]) for column, name in enumerate(header.nics)),
        numa_affinity=tuple(_numa_node(row.affinity.get("NUMA Affinity")) for row in rows),
    )


def read_cell(cell: str, where: str, itself: bool = False) -> Link:
    """Reads the cell of two GPUs, or of a GPU with itself. Raises InputError; the message begins with `where`."""
    if itself:
        if cell not in ("X", "x"):
            raise InputError(f"{where}: {cell!r} on the diagonal, expected X")
        return Link(level=Level.PSB)
    if cell in _LEVELS:
        return Link(level=_LEVELS[cell])
    found = _NVLINK.fullmatch(cell)
    if found is None or (found[2] or "SYS") not in _LEVELS:
        raise InputError(f"{where}: {cell!r} is not a link between two GPUs; allowed: {_ALLOWED}")
    return Link(level=_LEVELS[found[2] or "SYS"], nvlinks=int(found[1]))


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    affinity: tuple[str, ...]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    line: int
    links: list[Link]
    nics: list[Level | None]
    affinity: dict[str, str]


def _read_header(number: int, line: str) -> _Header:
    found = _AFFINITY.search(line)
    names = _split(line[: found.start()] if found else line, _GLUED_NAMES)
    count = next((position for position, name in enumerate(names) if not _GPU_NAME.fullmatch(name)), len(names))
    gpus, nics = names[:count], names[count:]
    _check_size(count)
    for column, name in enumerate(gpus):
        if name != f"GPU{column}":
            raise InputError(f"line {number}, column {column + 1}: {name} in the header where GPU{column} is expected")
    for column, name in enumerate(nics, start=count + 1):
        if _GPU_NAME.fullmatch(name) or _GLUED_CELLS.fullmatch(name) or nics.count(name) > 1:
            raise InputError(
                f"line {number}, column {column}: {name!r} in the header; allowed: GPU0, GPU1, ... and then names of NICs"
            )
    return _Header(gpus=tuple(gpus), nics=tuple(nics), affinity=tuple(_AFFINITY.findall(line)))


def _gpu_lines(header: _Header, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    filled = [(number, line) for number, line in lines if line]
    count = len(header.gpus)
    for gpu, (number, line) in zip(header.gpus, filled, strict=False):
        if (label := line.split(maxsplit=1)[0]) != gpu:
            raise InputError(f"line {number}: {label!r} where the row of {gpu} is expected (the header names {count} GPUs)")
    if len(filled) < count:
        raise InputError(f"the text ends before the row of {header.gpus[len(filled)]} (the header names {count} GPUs)")
    for number, line in filled[count:]:
        label = line.split(maxsplit=1)[0]
        if _GPU_NAME.fullmatch(label):
            raise InputError(f"line {number}: a row of {label}, but the header names {count} GPUs, the last {header.gpus[-1]}")
        if label not in header.nics:
            break
    return filled[:count]


def _read_row(header: _Header, number: int, line: str) -> _Row:
    label, *cells = line.split()
    expected = len(header.gpus) + len(header.nics)
    if len(cells) < expected + len(header.affinity):
        cells = _split(" ".join(cells), _GLUED_CELLS)
    if len(cells) < expected:
        raise InputError(f"line {number}: the row of {label} has {len(cells)} cells, expected {expected}")
    if len(cells) > expected + len(header.affinity):
        raise InputError(
            f"line {number}: the row of {label} has {len(cells)} cells, at most {expected + len(header.affinity)} fit"
        )
    where = f"line {number}, column"
    gpus, nics, rest = cells[: len(header.gpus)], cells[len(header.gpus) : expected], cells[expected:]
    # If a value is missing (some containers have no CPU affinity), it is not known which columns the other values belong to.
    affinity = dict(zip(header.affinity, rest, strict=True)) if len(rest) == len(header.affinity) else {}
    return _Row(
        line=number,
        links=[
            read_cell(cell, f"{where} {b + 1} ({name})", name == label)
            for b, (name, cell) in enumerate(zip(header.gpus, gpus, strict=True))
        ],
        nics=[
            None if cell == "N/A" else read_cell(cell, f"{where} {b + 1} ({name})").level
            for b, (name, cell) in enumerate(zip(header.nics, nics, strict=True), start=len(gpus))
        ],
        affinity=affinity,
    )


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The words of `text`. A word that consists of several matches of `pattern` becomes several words."""
    words: list[str] = []
    for word in text.split():
        parts = pattern.findall(word)
        words += parts if len(parts) > 1 and "".join(parts) == word else [word]
    return words


def _check_size(count: int) -> None:
    if not 1 <= count <= MAX_GPUS:
        raise InputError(f"{count} GPUs, allowed: 1 to {MAX_GPUS}")


def _build(rows: list[_Row]) -> Topology:
    links = [row.links for row in rows]
    for a, row in enumerate(rows):
        for b, other in enumerate(rows[:a]):
            if row.links[b] != other.links[a]:
                raise InputError(
                    f"the matrix is not symmetric: GPU{b} to GPU{a} is {cell_text(other.links[a])} (line {other.line}), "
                    f"GPU{a} to GPU{b} is {cell_text(row.links[b])} (line {row.line})"
                )
    return Topology(
        levels=tuple(tuple(link.level for link in row) for row in links),
        nvlinks=tuple(tuple(link.nvlinks for link in row) for row in links),
    )


def cell_text(link: Link) -> str:
    """A link as a cell that `read_cell` reads back."""
    return f"NV{link.nvlinks}+{link.level.name}" if link.nvlinks else link.level.name


def _nic(name: str, levels: list[Level | None]) -> Nic:
    closest = max((level for level in levels if level is not None), default=None)
    return Nic(name=name, nearest=tuple(gpu for gpu, level in enumerate(levels) if level is not None and level == closest))


def _numa_node(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
