"""`gpumgr place`: shows where the evaluators would place a request."""

import sys
from typing import Annotated, Any, Final

import click
import msgspec

from gpumgr.cli.node_source import FILE, MalformedInput, NodeSource, content, read_snapshot, read_topology, source_options
from gpumgr.cli.options import ExitingCommand
from gpumgr.common.errors import GpumgrError, Refusal, StateError
from gpumgr.common.foreign_text import UnreadableText, WrongStructure, decode_json
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.placement.evaluators.capacity import GpuCapacity
from gpumgr.placement.evaluators.select import Policy, check_request, evaluator_for, place
from gpumgr.placement.topology.devices import Topology

_EXAMPLES: Final = """
\b
Examples:
  gpumgr place --sim hgx-h100-8 --cores 400
  nvidia-smi topo -m | gpumgr place --topology - --cores 50 --memory 20
  gpumgr place --topology topo.txt --state state.json --cores 200 --output text
"""
_EXIT_CODES: Final = {0: "placed", 1: "refused, with the reason", 2: "wrong usage or malformed input"}


class GpuState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU of a state file."""

    index: Annotated[int, msgspec.Meta(ge=0)]
    cores_free: Annotated[int, msgspec.Meta(ge=0, le=CORES_PER_GPU)]
    memory_blocks_free: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    healthy: bool = True


class StateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state file: GPUs that are not listed are free."""

    gpus: list[GpuState]


_STATE_KEYS: Final = (
    f"; allowed keys: {', '.join(StateFile.__struct_fields__)}; "
    f"a GPU of the state may have: {', '.join(GpuState.__struct_fields__)}"
)


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs in the order of the topology's rows. `unschedulable`: for each GPU why it accepts nothing, or None."""

    topology: Topology
    indices: tuple[int, ...]
    blocks: tuple[int, ...]
    unschedulable: tuple[str | None, ...]


@click.command("place", cls=ExitingCommand, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@source_options
@click.option("--state", "state_file", type=FILE, help="JSON of what is free; GPUs that are not listed are free.")
@click.option("--cores", type=int, required=True, help="vcuda-core: 1 to 99 for a share, 100 or a multiple for whole GPUs.")
@click.option("--memory", type=int, default=0, show_default=True, help="vcuda-memory in blocks of 256 MiB.")
@click.option("--policy", type=click.Choice(["binpack", "spread"]), default="binpack", show_default=True, help="For shares.")
@click.option(
    "--memory-blocks-per-gpu",
    type=click.IntRange(min=1),
    default=320,
    show_default=True,
    help="Blocks of each GPU of a --topology; a --sim node has its own.",
)
@click.option("--output", type=click.Choice(["json", "text"]), default="json", show_default=True)
def command(
    source: NodeSource,
    state_file: str | None,
    cores: int,
    memory: int,
    policy: Policy,
    memory_blocks_per_gpu: int,
    output: str,
) -> None:
    """Show where the evaluators would place a request.

    Prints {"evaluator", "gpus", "score", "reason"}.
    """
    try:
        node = _node(source, memory_blocks_per_gpu)
        capacities = _capacities(node, None if state_file is None else read_state(state_file))
    except GpumgrError as error:
        raise MalformedInput(str(error)) from error
    result = _answer(node, capacities, cores, memory, policy)
    click.echo(msgspec.json.encode(result) if output == "json" else _as_text(result))
    sys.exit(0 if result["gpus"] is not None else 1)


def _node(source: NodeSource, blocks_per_gpu: int) -> _Node:
    if source.topology_file is not None:
        topology = read_topology(source.topology_file).topology
        n = len(topology)
        return _Node(topology=topology, indices=tuple(range(n)), blocks=(blocks_per_gpu,) * n, unschedulable=(None,) * n)
    if source.sim is None:
        raise click.UsageError("one of --topology and --sim is needed")
    snapshot = read_snapshot(source.sim)
    return _Node(
        topology=snapshot.topology,
        indices=tuple(gpu.index for gpu in snapshot.gpus),
        blocks=tuple(gpu.memory_blocks for gpu in snapshot.gpus),
        unschedulable=tuple("MIG enabled" if gpu.mig_enabled else None for gpu in snapshot.gpus),
    )


def read_state(path: str) -> StateFile:
    """Reads a state file; `-` is stdin. Raises StateError, which begins with the file's name."""
    try:
        return decode_json(content(path), StateFile)
    except WrongStructure as error:
        raise StateError(f"{path}: {error}{_STATE_KEYS if 'field' in str(error) else ''}") from error
    except UnreadableText as error:
        raise StateError(f"{path}: not JSON: {error}") from error
    except OSError as error:
        raise StateError(f"{path}: {error}") from error


def _answer(node: _Node, capacities: list[GpuCapacity], cores: int, memory: int, policy: Policy) -> dict[str, Any]:
    """The output of the command. For a refused request `gpus` is None, and `reason` a sentence."""
    try:
        check_request(cores, memory)
        placement = place(node.topology, capacities, cores=cores, memory_blocks=memory, policy=policy)
    except Refusal as refusal:
        return {"evaluator": evaluator_for(cores), "gpus": None, "score": None, "reason": str(refusal)}
    gpus = [node.indices[row] for row in placement.gpus]
    return {"evaluator": placement.evaluator, "gpus": gpus, "score": placement.score, "reason": None}


def _capacities(node: _Node, state: StateFile | None) -> list[GpuCapacity]:
    listed: dict[int, GpuState] = {}
    for entry in state.gpus if state else ():
        if entry.index not in node.indices:
            raise StateError(f"state: GPU {entry.index} is not on this node; it has {', '.join(map(str, node.indices))}")
        if entry.index in listed:
            raise StateError(f"state: GPU {entry.index} is listed twice")
        listed[entry.index] = entry
    return [_capacity(node, row, listed.get(index)) for row, index in enumerate(node.indices)]


def _capacity(node: _Node, row: int, entry: GpuState | None) -> GpuCapacity:
    blocks, label = node.blocks[row], f"GPU{node.indices[row]}"
    cores_free, blocks_free = (CORES_PER_GPU, blocks) if entry is None else (entry.cores_free, entry.memory_blocks_free)
    if blocks_free > blocks:
        raise StateError(f"state: {label} has memory_blocks_free {blocks_free}, more than its {blocks} blocks")
    note = "unhealthy" if entry is not None and not entry.healthy else node.unschedulable[row]
    return GpuCapacity(
        index=row,
        cores_free=cores_free,
        memory_blocks_free=blocks_free,
        entirely_free=cores_free == CORES_PER_GPU and blocks_free == blocks,
        healthy=note is None,
        label=label,
        note=note,
    )


def _as_text(result: dict[str, Any]) -> str:
    if result["gpus"] is None:
        return f"refused: {result['reason']}"
    score = "" if result["score"] is None else f" (score {result['score']})"
    return f"{result['evaluator']}: {', '.join(f'GPU{gpu}' for gpu in result['gpus'])}{score}"
