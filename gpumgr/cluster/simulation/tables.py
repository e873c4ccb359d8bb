"""Reads nodes and pods from CSV or JSON: the columns of the Alibaba trace gpu-v2023, or gpumgr's (docs/simulate.md, "Files").

All errors are InputError and name the place in the file. A JSON file is a list of objects with the columns as keys.
"""

import csv
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from gpumgr.cluster.simulation.model import GPU_MILLI, MOST, Amount, GpuCount, NodeSpec, Pod, Shape
from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json
from gpumgr.common.units import CORES_PER_GPU, count_text
from gpumgr.placement.requests import Constraints

#: The columns that each file needs.
_NEEDED: Final = ("name", "gpus", "cpu_milli", "ram_mebibytes")
#: Alibaba's column -> ours.
_RENAMED: Final = {
    "sn": "name",
    "gpu": "gpus",
    "num_gpu": "gpus",
    "memory_mib": "ram_mebibytes",
    "gpu_spec": "gpu_models",
    "creation_time": "arrival_seconds",
}
_Seconds = Annotated[float, Meta(ge=0, le=MOST)]
_Values = Mapping[str, str | int | float | None]
_Row = TypeVar("_Row", NodeSpec, "_PodRow")


class _PodRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the file of pods. `cores`: the cores that the pod requests of each GPU; Alibaba's trace has `gpu_milli` instead.
    `deletion_time` and `scheduled_time`, also Alibaba's, give the duration if `duration_seconds` is empty."""

    name: str = ""
    priority: Amount = 0
    gpus: GpuCount = 0
    cores: Annotated[int, Meta(ge=0, le=CORES_PER_GPU)] | None = None
    gpu_milli: Annotated[int, Meta(ge=0, le=GPU_MILLI)] | None = None
    memory_blocks: Amount = 0
    cpu_milli: Amount = 0
    ram_mebibytes: Amount = 0
    gpu_models: str = ""
    avoid_gpu_models: str = ""
    arrival_seconds: _Seconds = 0.0
    duration_seconds: _Seconds | None = None
    deletion_time: _Seconds | None = None
    scheduled_time: _Seconds | None = None

    def pod(self) -> Pod:
        """Raises ValueError if columns contradict each other."""
        return Pod(
            name=self.name,
            shape=self._shape(),
            priority=self.priority,
            arrival_seconds=self.arrival_seconds,
            duration_seconds=self._duration(),
        )

    def _shape(self) -> Shape:
        gpus, milli = self.gpus, self.gpu_milli
        if milli is None:
            milli = 10 * self.cores if self.cores is not None else GPU_MILLI if gpus else 0
        column = "cores" if self.gpu_milli is None else "gpu_milli"
        if gpus and not milli:
            raise ValueError(f"column {column}: it is 0 and the pod requests {count_text(gpus, 'GPU')}")
        if gpus > 1 and milli < GPU_MILLI:
            raise ValueError(
                f"column {column}: a pod with several GPUs requests whole ones: 100 cores, or 1000 GPU-milli, of each"
            )
        if not gpus and (milli or self.memory_blocks):
            raise ValueError(f"column {column if milli else 'memory_blocks'}: it is not 0 and the pod requests no GPU")
        return Shape(
            gpus=gpus,
            gpu_milli=milli,
            memory_blocks=self.memory_blocks,
            cpu_milli=self.cpu_milli,
            ram_mebibytes=self.ram_mebibytes,
            constraints=Constraints(use_models=_names(self.gpu_models), avoid_models=_names(self.avoid_gpu_models)),
        )

    def _duration(self) -> float | None:
        if self.duration_seconds is not None or self.deletion_time is None:
            return self.duration_seconds
        arrival, end = self.arrival_seconds, self.deletion_time
        start = arrival if self.scheduled_time is None else self.scheduled_time
        if not arrival <= start <= end:
            raise ValueError(
                f"column deletion_time: arrival at {arrival:g}, start at {start:g} and end at {end:g} are not in order"
            )
        return end - start


def _names(text: str) -> tuple[str, ...]:
    return tuple(each for part in text.split("|") if (each := part.strip()))


def read_nodes(file: str, lines: Iterable[str]) -> tuple[list[NodeSpec], list[str]]:
    """The nodes with GPUs, and the names of the nodes without, which are skipped. Raises InputError."""
    nodes: dict[str, NodeSpec] = {}
    skipped: list[str] = []
    for place, node in _rows(file, lines, NodeSpec):
        if node.name in nodes:
            raise InputError(f"{place}, column name: the name '{short(node.name)}' is there twice")
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
    for place, row in _rows(file, lines, _PodRow):
        try:
            pod = row.pod()
        except ValueError as error:
            raise InputError(f"{place}, {error}") from error
        if pod.shape not in shapes:
            used = pod.shape.constraints.use_models
            if used and not any(pod.shape.constraints.allows("", model) for model in models):
                raise InputError(f"{place}, column gpu_models: no node has a GPU of model '{short('|'.join(used))}'")
            if pod.shape.memory_blocks and not memory:
                raise InputError(
                    f"{place}, column memory_blocks: the file of the nodes has no GPU memory; add its column memory_blocks"
                )
        # Equal shapes are one object, to save memory.
        pods.append(replace(pod, shape=shapes.setdefault(pod.shape, pod.shape)))
    if not pods:
        raise InputError(f"{file}: it has no pods")
    return pods


def _rows(file: str, lines: Iterable[str], kind: type[_Row]) -> Iterator[tuple[str, _Row]]:
    """The rows, each with its place in the file, for messages. Empty fields get the default."""
    in_json = file.endswith(".json")
    checked: Collection[str] = ()
    for place, values in _json(file, lines) if in_json else _csv(file, lines):
        if values.keys() != checked:
            checked = values.keys()
            _check_columns(place if in_json else f"{file}, line 1", checked)
        texts = {_RENAMED.get(key, key): text for key, each in values.items() if each is not None and (text := str(each).strip())}
        try:
            yield place, convert(texts, kind, strict=False)
        except UnreadableText as error:
            raise InputError(f"{place}: {error}") from error


def _check_columns(place: str, columns: Collection[str]) -> None:
    for theirs, ours in {**_RENAMED, "gpu_milli": "cores"}.items():
        if ours in columns and theirs in columns:
            raise InputError(f"{place}: the columns {ours} and {theirs} have one meaning; keep one of them")
    for column in _NEEDED:
        names = [column, *(theirs for theirs, ours in _RENAMED.items() if ours == column)]
        if not any(name in columns for name in names):
            raise InputError(f"{place}: the column {' or '.join(names)} is missing; there are {short(', '.join(columns))}")


def _csv(file: str, lines: Iterable[str]) -> Iterator[tuple[str, _Values]]:
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


def _json(file: str, lines: Iterable[str]) -> Iterator[tuple[str, _Values]]:
    try:
        elements = decode_json("".join(lines).encode(), list[dict[str, str | int | float | None]])
    except UnreadableText as error:
        raise InputError(f"{file}: it is not a list of objects with texts and numbers in JSON: {error}") from error
    return ((f"{file}, element {number}", element) for number, element in enumerate(elements, start=1))


def short(text: str, most: int = 40) -> str:
    """The text for a message: with "?" for unprintable characters, and cut to `most` characters."""
    printed = "".join(each if each.isprintable() else "?" for each in text)
    return printed if len(printed) <= most else printed[: most - 3] + "..."
