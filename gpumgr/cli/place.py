"""`gpumgr place`: shows which GPUs of a node a request would get."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import click
import msgspec

from gpumgr.cli.options import ExitingCommand
from gpumgr.cli.topology import FILE, ShownNode, content, node_option
from gpumgr.common.errors import InputError, Refusal
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.placement.select import GpuCapacity, Policy, check_request, evaluator_for, place

_EXAMPLES: Final = """
\b
Examples:
  gpumgr place --sim hgx-h100-8 --cores 400
  nvidia-smi topo -m | gpumgr place --topology - --cores 50 --memory 20
  gpumgr place --topology topo.txt --state state.json --cores 200 --output text
"""
_EXIT_CODES: Final = {0: "placed", 1: "refused, with the reason", 2: "wrong usage or malformed input"}


class GpuState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: Annotated[int, msgspec.Meta(ge=0)]
    cores_free: Annotated[int, msgspec.Meta(ge=0, le=CORES_PER_GPU)]
    memory_blocks_free: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    healthy: bool = True


class StateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs that a state file does not list are free."""

    gpus: list[GpuState]


class _Row(msgspec.Struct, frozen=True):
    """A GPU of the node, with its memory in blocks of 256 MiB. `note`: why the GPU accepts nothing."""

    index: int
    blocks: int
    note: str | None = None


@click.command("place", cls=ExitingCommand, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@node_option(required=True)
@click.option("--state", "state_file", type=FILE, help="JSON of what is free; GPUs that are not listed are free.")
@click.option("--cores", type=int, required=True, help="vcuda-core: 1 to 99 for a share, 100 or a multiple for whole GPUs.")
@click.option("--memory", type=int, default=0, show_default=True, help="vcuda-memory in blocks of 256 MiB.")
@click.option("--policy", type=click.Choice(["binpack", "spread"]), default="binpack", show_default=True, help="For shares.")
@click.option(
    "--memory-blocks-per-gpu",
    type=click.IntRange(min=1),
    default=320,
    show_default=True,
    help="Memory blocks of each GPU with --topology. With --sim, the node's description has them.",
)
@click.option("--output", type=click.Choice(["json", "text"]), default="json", show_default=True)
def command(
    node: ShownNode,
    state_file: str | None,
    cores: int,
    memory: int,
    policy: Policy,
    memory_blocks_per_gpu: int,
    output: str,
) -> None:
    """Show which GPUs of a node a request would get.

    The JSON has {"evaluator", "gpus", "score", "reason"}. The evaluator is the placement algorithm for this kind of request.
    """
    rows = [_Row(gpu.index, gpu.memory_blocks, "MIG enabled" if gpu.mig_enabled else None) for gpu in node.gpus]
    rows = rows or [_Row(index, memory_blocks_per_gpu) for index in range(len(node.topology))]
    capacities = _capacities(rows, None if state_file is None else read_state(state_file))
    result: dict[str, Any]
    try:
        check_request(cores, memory)
        placement = place(node.topology, capacities, cores=cores, memory_blocks=memory, policy=policy)
    except Refusal as refusal:
        result = {"evaluator": evaluator_for(cores), "gpus": None, "score": None, "reason": str(refusal)}
    else:
        gpus = [rows[row].index for row in placement.gpus]
        result = {"evaluator": placement.evaluator, "gpus": gpus, "score": placement.score, "reason": None}
    click.echo(msgspec.json.encode(result) if output == "json" else _as_text(result))
    sys.exit(0 if result["gpus"] is not None else 1)


def read_state(path: str) -> StateFile:
    """`-` is stdin. Raises InputError, which begins with the file's name."""
    try:
        return decode_json(content(path), StateFile)
    except (UnreadableText, OSError) as error:
        raise InputError(f"{path}: {error}") from error


def _capacities(rows: Sequence[_Row], state: StateFile | None) -> list[GpuCapacity]:
    known = {row.index for row in rows}
    listed: dict[int, GpuState] = {}
    for entry in state.gpus if state else ():
        if entry.index not in known:
            raise InputError(f"state: GPU {entry.index} is not on this node; it has {', '.join(str(row.index) for row in rows)}")
        if entry.index in listed:
            raise InputError(f"state: GPU {entry.index} is listed twice")
        listed[entry.index] = entry
    return [
        _capacity(number, row, listed.get(row.index, GpuState(row.index, CORES_PER_GPU, row.blocks)))
        for number, row in enumerate(rows)
    ]


def _capacity(number: int, row: _Row, free: GpuState) -> GpuCapacity:
    """`number`: the GPU's row in the topology."""
    label = f"GPU{row.index}"
    if free.memory_blocks_free > row.blocks:
        raise InputError(f"state: {label} has memory_blocks_free {free.memory_blocks_free}, more than its {row.blocks} blocks")
    note = row.note if free.healthy else "unhealthy"
    return GpuCapacity(
        index=number,
        cores_free=free.cores_free,
        memory_blocks_free=free.memory_blocks_free,
        entirely_free=free.cores_free == CORES_PER_GPU and free.memory_blocks_free == row.blocks,
        healthy=note is None,
        label=label,
        note=note,
    )


def _as_text(result: dict[str, Any]) -> str:
    if result["gpus"] is None:
        return f"refused: {result['reason']}"
    score = "" if result["score"] is None else f" (score {result['score']})"
    return f"{result['evaluator']}: {', '.join(f'GPU{gpu}' for gpu in result['gpus'])}{score}"
