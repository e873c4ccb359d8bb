"""Reads nodes and pods from CSV or JSON: the columns of the Alibaba trace gpu-v2023, or gpumgr's (docs/simulate.md, "Files").

All errors are InputError and name file, line and column. A JSON file is a list of objects: an error names the line where the object begins,
and its key as the column, or the byte where the file is not JSON.
"""

import csv
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gpumgr.cluster.simulation.model import GPU_MILLI, NodeSpec, Pod, Shape
from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import count_text
from gpumgr.placement.evaluators.constraints import Constraints
from gpumgr.placement.topology.matrix import MAX_GPUS

MAX_ROWS: Final = 1_000_000
_LARGEST: Final = 10**12

#: Alibaba's column -> ours.
_NODE_COLUMNS: Final = {"sn": "name", "gpu": "gpus", "memory_mib": "ram_mebibytes"}
_POD_COLUMNS: Final = {
    "num_gpu": "gpus",
    "memory_mib": "ram_mebibytes",
    "gpu_spec": "gpu_models",
    "creation_time": "arrival_seconds",
}


class _Row:
    """One row. Values of JSON become text, so that both formats are checked alike."""

    def __init__(self, place: str, values: Mapping[str, str]) -> None:
        self._place, self._values = place, values

    def error(self, column: str, what: str) -> InputError:
        return InputError(f"{self._place}, column {column}: {what}")

    def text(self, column: str) -> str:
        return self._values.get(column, "").strip()

    def has(self, column: str) -> bool:
        return column in self._values

    def names(self, column: str) -> tuple[str, ...]:
        return tuple(each for part in self.text(column).split("|") if (each := part.strip()))

    def number(self, column: str, most: int = _LARGEST) -> int:
        """A whole number between 0 and `most`; an empty field is 0."""
        text = self.text(column)
        try:
            number = int(text or "0")
        except ValueError:
            raise self.error(column, f"'{short(text)}' is not a whole number") from None
        if not 0 <= number <= most:
            raise self.error(column, f"{short(text)} is not between 0 and {most}")
        return number

    def seconds(self, column: str) -> float | None:
        text = self.text(column)
        try:
            number = float(text) if text else None
        except ValueError:
            number = math.nan
        if number is not None and not 0 <= number <= _LARGEST:
            raise self.error(column, f"'{short(text)}' is not a number of seconds between 0 and {_LARGEST}")
        return number


def read_nodes(file: str, lines: Iterable[str]) -> tuple[list[NodeSpec], list[str]]:
    """The nodes with GPUs, and the names of the nodes without, which are skipped. Raises InputError."""
    nodes: dict[str, NodeSpec] = {}
    skipped: list[str] = []
    for row in _rows(file, lines, _NODE_COLUMNS, ("name", "gpus", "cpu_milli", "ram_mebibytes")):
        node = NodeSpec(
            name=row.text("name"),
            gpus=row.number("gpus", MAX_GPUS),
            model=row.text("model"),
            memory_blocks=row.number("memory_blocks"),
            cpu_milli=row.number("cpu_milli"),
            ram_mebibytes=row.number("ram_mebibytes"),
        )
        if not node.name or node.name in nodes:
            raise row.error("name", f"the name '{short(node.name)}' is there twice" if node.name else "the name is empty")
        if node.gpus:
            nodes[node.name] = node
        else:
            skipped.append(node.name)
    if not nodes:
        raise InputError(f"{file}: no node has a GPU" if skipped else f"{file}: it has no nodes")
    return list(nodes.values()), skipped


def read_pods(file: str, lines: Iterable[str], nodes: Sequence[NodeSpec]) -> list[Pod]:
    """Reads the trace. Raises InputError, also if a pod requests a model that no node has, or GPU memory although the nodes' file gives
    none."""
    shapes: dict[Shape, Shape] = {}
    pods: list[Pod] = []
    models = {node.model for node in nodes}
    memory = any(node.memory_blocks for node in nodes)
    for row in _rows(file, lines, _POD_COLUMNS, ("name", "gpus", "cpu_milli", "ram_mebibytes")):
        shape = _shape(row)
        if shape not in shapes:
            used = shape.constraints.use_models
            if used and not any(shape.constraints.allows("", model) for model in models):
                raise row.error("gpu_models", f"no node has a GPU of model '{short('|'.join(used))}'")
            if shape.memory_blocks and not memory:
                raise row.error("memory_blocks", "the file of the nodes has no GPU memory; add its column memory_blocks")
        arrival, duration = row.seconds("arrival_seconds") or 0.0, row.seconds("duration_seconds")
        if duration is None and (end := row.seconds("deletion_time")) is not None:
            if end < arrival:
                raise row.error("deletion_time", f"{end:g} is before the pod's arrival at {arrival:g}")
            start = row.seconds("scheduled_time")
            if start is not None and not arrival <= start <= end:
                raise row.error(
                    "scheduled_time", f"{start:g} is not between the pod's arrival at {arrival:g} and its end at {end:g}"
                )
            duration = end - (arrival if start is None else start)
        pods.append(
            Pod(
                name=row.text("name"),
                shape=shapes.setdefault(shape, shape),
                namespace=row.text("namespace"),
                priority=row.number("priority"),
                arrival_seconds=arrival,
                duration_seconds=duration,
            )
        )
    if not pods:
        raise InputError(f"{file}: it has no pods")
    return pods


def _shape(row: _Row) -> Shape:
    gpus = row.number("gpus", MAX_GPUS)
    ours = not row.has("gpu_milli")
    column = "cores" if ours else "gpu_milli"
    milli = row.number("cores", 100) * 10 if ours else row.number("gpu_milli", GPU_MILLI)
    if ours and gpus and not row.text("cores"):
        milli = GPU_MILLI
    if gpus and not milli:
        raise row.error(column, f"it is 0 and the pod requests {count_text(gpus, 'GPU')}")
    if milli and not gpus:
        raise row.error(column, "it is not 0 and the pod requests no GPU")
    if gpus > 1 and milli < GPU_MILLI:
        raise row.error(column, "a pod with several GPUs requests whole ones: 100 cores, or 1000 GPU-milli, of each")
    blocks = row.number("memory_blocks")
    if blocks and not gpus:
        raise row.error("memory_blocks", "it is not 0 and the pod requests no GPU")
    return Shape(
        gpus=gpus,
        gpu_milli=milli,
        memory_blocks=blocks,
        cpu_milli=row.number("cpu_milli"),
        ram_mebibytes=row.number("ram_mebibytes"),
        constraints=Constraints(use_models=row.names("gpu_models"), avoid_models=row.names("avoid_gpu_models")),
    )


def _rows(file: str, lines: Iterable[str], renamed: Mapping[str, str], needed: Sequence[str]) -> Iterator[_Row]:
    """Yields the rows under our column names, even if the file uses Alibaba's."""
    in_json = file.endswith(".json")
    checked: Collection[str] = ()
    for number, (place, values) in enumerate(_json(file, lines) if in_json else _csv(file, lines), start=1):
        if number > MAX_ROWS:
            raise InputError(f"{place}: more than {MAX_ROWS:,} rows")
        if values.keys() != checked:
            checked = values.keys()
            _check_columns(place if in_json else f"{file}, line 1", checked, renamed, needed)
        yield _Row(place, {renamed.get(column, column): text for column, text in values.items()})


def _check_columns(place: str, columns: Collection[str], renamed: Mapping[str, str], needed: Sequence[str]) -> None:
    for theirs, ours in {**renamed, "gpu_milli": "cores"}.items():
        if ours in columns and theirs in columns:
            raise InputError(f"{place}: the columns {ours} and {theirs} have one meaning; keep one of them")
    alibaba = {ours: theirs for theirs, ours in renamed.items()}
    for column in needed:
        if column not in columns and alibaba.get(column) not in columns:
            other = f" (or {alibaba[column]})" if column in alibaba else ""
            raise InputError(f"{place}: the column {column}{other} is missing; there are {short(', '.join(columns))}")


def _csv(file: str, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if repeated := next((name for name, count in Counter(header).items() if count > 1), None):
            raise InputError(f"{file}, line 1: the column {short(repeated)} is there twice")
        for fields in reader:
            if not fields:
                continue
            place = f"{file}, line {reader.line_num}"
            if len(fields) != len(header):
                raise InputError(f"{place}: {count_text(len(fields), 'column')}, and the header has {len(header)}")
            yield place, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise InputError(f"{file}, line {reader.line_num}: {error}") from error


def _json(file: str, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    text = "".join(lines).encode()
    try:
        elements = decode_json(text, list[msgspec.Raw])
    except UnreadableText as error:
        raise InputError(f"{file}: it is not a list of objects in JSON: {error}") from error
    line, begin, end = 1, 0, 0
    for number, raw in enumerate(elements, start=1):
        before, begin = begin, text.index(raw, end)
        line, end = line + text.count(b"\n", before, begin), begin + len(raw)
        place = f"{file}, line {line}, element {number}"
        try:
            element = decode_json(raw, dict[str, Any])
        except UnreadableText as error:
            raise InputError(f"{place}: {error}") from error
        for key, value in element.items():
            if isinstance(value, (list, dict, bool)):
                raise InputError(f"{place}, column {short(key)}: a text or a number is expected")
        yield place, {key: "" if value is None else str(value) for key, value in element.items()}


def short(text: str, most: int = 40) -> str:
    """The text for a message: with "?" for unprintable characters, and cut to `most` characters."""
    printed = "".join(each if each.isprintable() else "?" for each in text)
    return printed if len(printed) <= most else printed[: most - 3] + "..."
