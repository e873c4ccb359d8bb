"""Requests and results of `gpumgr place`, for the command's options and for the lines of a batch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import click
import msgspec

from gpumgr.common.errors import InputError, Refusal, StateError, TopologyError
from gpumgr.common.foreign_text import UnreadableText, WrongStructure, decode_json
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.placement.evaluators.capacity import GpuCapacity
from gpumgr.placement.evaluators.select import Policy, check_request, evaluator_for, place
from gpumgr.placement.topology.devices import NodeSnapshot, Topology
from gpumgr.placement.topology.matrix import ParsedTopology, parse_topology, topology_from_matrix

DEFAULT_BLOCKS_PER_GPU = 320

_Number = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
_Blocks = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_BlocksPerGpu = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


#: A file option: checked when it is parsed, opened when it is read; - is stdin.
FILE = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)


class MalformedInput(click.ClickException):
    """Wrong input: exit code 2, the message on stderr."""

    exit_code = 2


class GpuState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU of a state file."""

    index: Annotated[int, msgspec.Meta(ge=0)]
    cores_free: Annotated[int, msgspec.Meta(ge=0, le=CORES_PER_GPU)]
    memory_blocks_free: _Blocks
    healthy: bool = True


class StateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state file: GPUs that are not listed are free."""

    gpus: list[GpuState]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a batch. None: the command line's value."""

    cores: _Number
    memory: _Number = 0
    topology: str | list[list[str]] | None = None
    state: StateFile | None = None
    memory_blocks_per_gpu: _BlocksPerGpu | None = None
    policy: Literal["binpack", "spread"] | None = None


_T = TypeVar("_T")
_KEYS = "; a GPU of the state may have: " + ", ".join(GpuState.__struct_fields__)
_STATE_KEYS = "; allowed keys: " + ", ".join(StateFile.__struct_fields__) + _KEYS
_QUESTION_KEYS = "; allowed keys: " + ", ".join(Question.__struct_fields__) + _KEYS

_POLICIES = "; allowed: binpack, spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNode:
    """The GPUs of a request in the order of the topology's rows. `unschedulable` has the reason why a GPU takes nothing, or None."""

    topology: Topology
    indices: tuple[int, ...]
    blocks: tuple[int, ...]
    unschedulable: tuple[str | None, ...]


def node_from_topology(topology: Topology, blocks_per_gpu: int) -> RequestNode:
    n = len(topology)
    return RequestNode(topology=topology, indices=tuple(range(n)), blocks=(blocks_per_gpu,) * n, unschedulable=(None,) * n)


def node_from_snapshot(snapshot: NodeSnapshot) -> RequestNode:
    return RequestNode(
        topology=snapshot.topology,
        indices=tuple(gpu.index for gpu in snapshot.gpus),
        blocks=tuple(gpu.memory_blocks for gpu in snapshot.gpus),
        unschedulable=tuple("MIG enabled" if gpu.mig_enabled else None for gpu in snapshot.gpus),
    )


def read_topology(path: str) -> ParsedTopology:
    """Read a file of topo -m text, - for stdin. Raises TopologyError that begins with the file's name."""
    try:
        return parse_topology(_content(path).decode())
    except (OSError, UnicodeDecodeError, TopologyError) as error:
        raise TopologyError(f"{path}: {error}") from error


def read_state(path: str) -> StateFile:
    """Read a state file, - for stdin. Raises StateError that begins with the file's name."""
    try:
        return _decode(StateFile, _content(path), _STATE_KEYS, StateError)
    except (OSError, StateError) as error:
        raise StateError(f"{path}: {error}") from error


def parse_question(line: bytes) -> Question:
    """Parses a line of a batch. Raises InputError with the position and the allowed keys."""
    return _decode(Question, line, _QUESTION_KEYS, InputError)


def node_of(question: Question, default: RequestNode | None, default_blocks: int) -> RequestNode:
    """The node of a line: its own topology's, or else the command line's. Raises InputError, TopologyError."""
    blocks = question.memory_blocks_per_gpu or default_blocks
    match question.topology:
        case str(text):
            return node_from_topology(parse_topology(text).topology, blocks)
        case list(rows):
            return node_from_topology(topology_from_matrix(rows), blocks)
    if default is None:
        raise InputError("the key topology is missing, and neither --topology nor --sim is on the command line")
    return default


def answer(node: RequestNode, state: StateFile | None, cores: int, memory: int, policy: Policy) -> dict[str, Any]:
    """The output of `place`. For a refused request `gpus` is None, and `reason` a sentence. Raises StateError."""
    capacities = _capacities(node, state)
    try:
        check_request(cores, memory)
        placement = place(node.topology, capacities, cores=cores, memory_blocks=memory, policy=policy)
    except Refusal as refusal:
        return {"evaluator": evaluator_for(cores), "gpus": None, "score": None, "reason": str(refusal)}
    gpus = [node.indices[row] for row in placement.gpus]
    return {"evaluator": placement.evaluator, "gpus": gpus, "score": placement.score, "reason": None}


def _capacities(node: RequestNode, state: StateFile | None) -> list[GpuCapacity]:
    listed: dict[int, GpuState] = {}
    for entry in state.gpus if state else ():
        if entry.index not in node.indices:
            raise StateError(f"state: GPU {entry.index} is not on this node; it has {', '.join(map(str, node.indices))}")
        if entry.index in listed:
            raise StateError(f"state: GPU {entry.index} is listed twice")
        listed[entry.index] = entry
    return [_capacity(node, row, listed.get(index)) for row, index in enumerate(node.indices)]


def _capacity(node: RequestNode, row: int, entry: GpuState | None) -> GpuCapacity:
    blocks, label = node.blocks[row], f"GPU{node.indices[row]}"
    cores_free, blocks_free = (CORES_PER_GPU, blocks) if entry is None else (entry.cores_free, entry.memory_blocks_free)
    if blocks_free > blocks:
        raise StateError(f"state: {label} has memory_blocks_free {blocks_free}, more than its {blocks} blocks")
    sick = "unhealthy" if entry is not None and not entry.healthy else node.unschedulable[row]
    return GpuCapacity(
        index=row,
        cores_free=cores_free,
        memory_blocks_free=blocks_free,
        entirely_free=cores_free == CORES_PER_GPU and blocks_free == blocks,
        healthy=sick is None,
        label=label,
        note=sick,
    )


def _content(path: str) -> bytes:
    with click.open_file(path, "rb") as file:
        content: bytes = file.read()
        return content


def _decode(structure: type[_T], content: bytes, keys: str, kind: type[InputError]) -> _T:
    try:
        return decode_json(content, structure)
    except WrongStructure as error:
        hint = keys if "field" in str(error) else _POLICIES if "enum" in str(error) else ""
        raise kind(f"{error}{hint}") from error
    except UnreadableText as error:
        raise kind(f"not JSON: {error}") from error
