"""`gpumgr place`: shows where the evaluators would place a request."""

import sys
from collections.abc import Iterable
from typing import Any, Final

import click
import msgspec

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.options import sim_option
from gpumgr.cli.place_request import (
    DEFAULT_BLOCKS_PER_GPU,
    FILE,
    MalformedInput,
    RequestNode,
    answer,
    node_from_snapshot,
    node_from_topology,
    node_of,
    parse_question,
    read_state,
    read_topology,
)
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.placement.evaluators.select import Policy

_EXAMPLES = """
\b
Examples:
  gpumgr place --sim hgx-h100-8 --cores 400
  nvidia-smi topo -m | gpumgr place --topology - --cores 50 --memory 20
  gpumgr place --topology topo.txt --state state.json --cores 200 --output text
  gpumgr place --batch questions.jsonl
"""
_EXIT_CODES: Final = {
    0: "placed (--batch: each line has its answer)",
    1: "refused, with the reason",
    2: "wrong usage or malformed input",
}


@click.command("place", cls=ExitingCommand, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@click.option("--topology", "topology_file", type=FILE, help="Text of `nvidia-smi topo -m`; - reads stdin.")
@sim_option
@click.option("--state", "state_file", type=FILE, help="JSON of what is free; GPUs that are not listed are free.")
@click.option("--cores", type=int, help="vcuda-core: 1 to 99 for a share, 100 or a multiple for whole GPUs.")
@click.option("--memory", type=int, help="vcuda-memory in blocks of 256 MiB.  [default: 0]")
@click.option("--policy", type=click.Choice(["binpack", "spread"]), default="binpack", show_default=True, help="For shares.")
@click.option(
    "--memory-blocks-per-gpu",
    type=click.IntRange(min=1),
    default=DEFAULT_BLOCKS_PER_GPU,
    show_default=True,
    help="Blocks of each GPU of a --topology; a --sim node has its own.",
)
@click.option("--batch", type=FILE, help="One JSON request per line, one result per line; - reads stdin.")
@click.option("--output", type=click.Choice(["json", "text"]), default="json", show_default=True)
@click.pass_context
def command(
    ctx: click.Context,
    topology_file: str | None,
    sim: str | None,
    state_file: str | None,
    cores: int | None,
    memory: int | None,
    policy: Policy,
    memory_blocks_per_gpu: int,
    batch: str | None,
    output: str,
) -> None:
    """Show where the evaluators would place a request.

    Prints {"evaluator", "gpus", "score", "reason"}.
    """
    if topology_file is not None and sim is not None:
        raise click.UsageError("--topology and --sim exclude each other")
    if batch is not None and ((state_file, cores, memory) != (None, None, None) or output != "json"):
        raise click.UsageError("with --batch, each line has its own state, cores and memory, and the output is JSON")
    try:
        node = _node(topology_file, sim, memory_blocks_per_gpu)
        if batch is not None:
            with click.open_file(batch, "rb") as lines:
                _answer_batch(lines, node, memory_blocks_per_gpu, policy)
            return
        if node is None:
            raise click.UsageError("one of --topology, --sim and --batch is needed")
        if cores is None:
            raise click.UsageError("--cores is needed")
        state = None if state_file is None else read_state(state_file)
        result = answer(node, state, cores, memory or 0, policy)
    except GpumgrError as error:
        raise MalformedInput(str(error)) from error
    click.echo(msgspec.json.encode(result) if output == "json" else _as_text(result))
    ctx.exit(0 if result["gpus"] is not None else 1)


def _node(topology_file: str | None, sim: str | None, blocks_per_gpu: int) -> RequestNode | None:
    if topology_file is not None:
        return node_from_topology(read_topology(topology_file).topology, blocks_per_gpu)
    if sim is not None:
        from gpumgr.cli.snapshot import read_sim_snapshot  # the driver's library is loaded only where a node is read

        return node_from_snapshot(read_sim_snapshot(sim))
    return None


def _answer_batch(lines: Iterable[bytes], node: RequestNode | None, blocks_per_gpu: int, policy: Policy) -> None:
    out = sys.stdout.buffer
    for number, line in enumerate(lines, start=1):
        try:
            question = parse_question(line)
            of_line = node_of(question, node, blocks_per_gpu)
            result = answer(of_line, question.state, question.cores, question.memory, question.policy or policy)
        except InputError as error:
            result = {"error": f"line {number}: {error}"}
        out.write(msgspec.json.encode(result) + b"\n")
        out.flush()


def _as_text(result: dict[str, Any]) -> str:
    if result["gpus"] is None:
        return f"refused: {result['reason']}"
    score = "" if result["score"] is None else f" (score {result['score']})"
    return f"{result['evaluator']}: {', '.join(f'GPU{gpu}' for gpu in result['gpus'])}{score}"
