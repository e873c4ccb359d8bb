"""`gpumgr gpu`: takes GPUs out of service and brings them back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.draining import counted, drained
from gpumgr.cli.asking.orders import Answer, give_order, read_answer
from gpumgr.cli.asking.where import find_agent, where_options
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.printable import json_line, printable
from gpumgr.cli.showing.amounts import clock_time, cores, gibibytes
from gpumgr.cli.typed import Seconds, gpu_word, reason_text

WAIT_SECONDS: Final = 600.0

_GPU = click.argument("gpu", metavar="GPU", callback=gpu_word)
_REASON = click.option(
    "--reason", default="", callback=reason_text, metavar="TEXT", help="Why; pods that are refused for it and all pages tell it."
)
_REFUSED: Final = "the agent refuses or does not answer"
_WRONG: Final = "wrong usage or settings, or no such GPU"
_EXIT_CODES: Final = {0: "done", 1: _REFUSED, 2: _WRONG}
_OUTPUT = click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print.")


@click.group("gpu")
def command() -> None:
    """Take a GPU out of service for maintenance, and bring it back. GPU is its index (3 or GPU3), or its UUID or the beginning of it.

    All need a running agent, and root. A GPU stays out of service over restarts of the agent and of the node.

    \b
    Examples:
      gpumgr gpu drain 3 --reason 'ECC errors, ticket 4711' --evict --wait
      gpumgr gpu reset 3
      gpumgr gpu uncordon 3
    """


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@_REASON
@where_options
@_OUTPUT
def cordon(gpu: str, reason: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Place nothing new on a GPU. Who is on it goes on.

    Once more with another reason changes the reason.

    \b
    Examples:
      gpumgr gpu cordon 3 --reason 'broken fan'
      gpumgr gpu cordon GPU-0fe1 --output json
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "cordon", gpu, reason=reason))
    _print(document, output, _cordoned(read_answer(document)))


@command.command(cls=ExitingCommand, exit_codes={0: "nobody is on the GPU", 1: f"somebody still is, or {_REFUSED}", 2: _WRONG})
@_GPU
@_REASON
@click.option(
    "--evict", is_flag=True, help="Ask the API server to evict the pods that are on it; their disruption budgets are kept."
)
@click.option("--wait", is_flag=True, help="Wait until nobody is on it any more.")
@click.option("--timeout", type=Seconds(), metavar="SECONDS", help=f"How long to wait.  [default: {WAIT_SECONDS:g}]")
@where_options
@_OUTPUT
@click.pass_context
def drain(
    ctx: click.Context,
    gpu: str,
    reason: str,
    evict: bool,
    wait: bool,
    timeout: float | None,
    file: Path | None,
    socket: Path | None,
    output: str,
) -> None:
    """Cordon a GPU and tell who is still on it.

    Without --evict nobody is ended: who is on it goes on until it ends by itself.

    \b
    Examples:
      gpumgr gpu drain 3
      gpumgr gpu drain 3 --evict --wait --timeout 300
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait")
    seconds = (WAIT_SECONDS if timeout is None else timeout) if wait else None
    document = asyncio.run(drained(find_agent(file, socket).socket, gpu, reason, evict=evict, wait_seconds=seconds))
    answer = read_answer(document)
    _print(document, output, _drained(answer))
    ctx.exit(0 if answer.empty else 1)


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@where_options
@_OUTPUT
def uncordon(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Give a GPU back. It is offered again after a few good looks at it.

    \b
    Examples:
      gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "uncordon", gpu))
    answer = read_answer(document)
    line = (
        f"{answer.label} is back in service as soon as the driver finds it well"
        if answer.changed
        else f"{answer.label} was not cordoned"
    )
    _print(document, output, [line])


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@where_options
@_OUTPUT
def reset(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Reset a GPU that is cordoned and empty, by `nvidia-smi --gpu-reset`. It stays cordoned.

    nvidia-smi refuses while anybody has the GPU open. The agent lets go of it meanwhile; other monitors (DCGM) and persistence mode
    are yours to stop. Where several GPUs can only be reset together, nvidia-smi says so.

    \b
    Examples:
      gpumgr gpu drain 3 --evict --wait && gpumgr gpu reset 3 && gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "reset", gpu))
    said = [printable(line) for line in str(document.get("said", "")).splitlines()]
    _print(
        document,
        output,
        [*said, f"{read_answer(document).label} was reset; it is cordoned still: `gpumgr gpu uncordon` gives it back"],
    )


async def _order(socket: Path, action: str, gpu: str, *, reason: str = "") -> dict[str, Any]:
    async with AgentClient(socket) as agent:
        return await give_order(agent, action, gpu, reason=reason)


# -- people ----------------------------------------------------------------------------------------------------------------


def _print(document: dict[str, Any], output: str, lines: list[str]) -> None:
    click.echo(json_line(document) if output == "json" else "\n".join(lines))


def _cordoned(answer: Answer) -> list[str]:
    because = f": {answer.cordon.reason}" if answer.cordon and answer.cordon.reason else ""
    lines = [f"{answer.label} is cordoned{because}{'' if answer.changed else ' (it was so already)'}"]
    if answer.containers:
        lines += [f"{counted(len(answer.containers), 0)} on it, to go on:", *_rows(answer)]
    return lines


def _drained(answer: Answer) -> list[str]:
    if answer.empty:
        return [f"{answer.label} is cordoned and empty"]
    still = (
        counted(len(answer.containers), len(answer.strangers)) or "nobody that is known, but its processes were not looked at yet"
    )
    lines = [f"{answer.label} is cordoned; still on it: {still}", *_rows(answer)]
    if answer.evicting:
        lines.append(f"to be evicted as soon as their disruption budgets allow it: {', '.join(answer.evicting)}")
    if answer.not_evicted:
        lines.append(f"can't be evicted: {'; '.join(answer.not_evicted)}")
    if answer.strangers:
        lines.append("processes that no allocation lets be there are yours to end")
    return lines


def _rows(answer: Answer) -> Iterator[str]:
    for row in answer.containers:
        size = f"{cores(row.cores)}, {gibibytes(row.memory_bytes)} GiB"
        yield f"  {row.pod_name} ({row.container or '?'})  {size}, since {clock_time(row.granted_at)}"
    for each in answer.strangers:
        yield f"  pid {each.pid}  {gibibytes(each.memory_bytes)} GiB" + (
            f", in container {each.container}" if each.container else ""
        )
