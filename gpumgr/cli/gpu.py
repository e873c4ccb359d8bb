"""`gpumgr gpu`: takes GPUs out of service and brings them back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.agent.api import MaintenanceResult
from gpumgr.cli.client.agent_client import AgentClient
from gpumgr.cli.client.drain import counted, drain_gpu, request_maintenance
from gpumgr.cli.client.schema import read_result
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.options import agent_options, find_agent, output_option
from gpumgr.cli.parameters import gpu_word, reason_text, seconds
from gpumgr.cli.printable import json_line, printable
from gpumgr.cli.rendering.formats import clock_time, cores, memory_text

WAIT_SECONDS: Final = 600.0

_GPU = click.argument("gpu", metavar="GPU", callback=gpu_word)
_REASON = click.option(
    "--reason", default="", callback=reason_text, metavar="TEXT", help="Shown on all pages, and to pods that are refused for it."
)
_REFUSED: Final = "the agent refuses or does not respond"
_WRONG: Final = "wrong usage or settings, or no such GPU"
_EXIT_CODES: Final = {0: "done", 1: _REFUSED, 2: _WRONG}


@click.group("gpu")
def command() -> None:
    """Take a GPU out of service for maintenance, and bring it back. GPU is its index (3 or GPU3), or its UUID or the beginning of it.

    All commands need a running agent, and root. A GPU stays out of service over restarts of the agent and of the node.

    \b
    Examples:
      gpumgr gpu drain 3 --reason 'ECC errors, ticket 4711' --evict --wait
      gpumgr gpu reset 3
      gpumgr gpu uncordon 3
      gpumgr gpu forget GPU-0fe1
    """


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@_REASON
@agent_options
@output_option
def cordon(gpu: str, reason: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Place nothing new on a GPU. Containers on it continue.

    A second cordon with another reason changes the reason.

    \b
    Examples:
      gpumgr gpu cordon 3 --reason 'broken fan'
      gpumgr gpu cordon GPU-0fe1 --output json
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "cordon", gpu, reason=reason))
    _print(document, output, _cordoned(read_result(document)))


@command.command(cls=ExitingCommand, exit_codes={0: "the GPU is empty", 1: f"it is not empty, or {_REFUSED}", 2: _WRONG})
@_GPU
@_REASON
@click.option(
    "--evict", is_flag=True, help="Evict the pods that are on it through the API server, within their disruption budgets."
)
@click.option("--wait", is_flag=True, help="Wait until the GPU is empty.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    callback=seconds,
    metavar="SECONDS",
    help=f"How long to wait.  [default: {WAIT_SECONDS:g}]",
)
@agent_options
@output_option
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
    """Cordon a GPU and show what is still on it.

    Without --evict the containers on it continue until they end by themselves.

    \b
    Examples:
      gpumgr gpu drain 3
      gpumgr gpu drain 3 --evict --wait --timeout 300
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    wait_seconds = (WAIT_SECONDS if timeout is None else timeout) if wait else None
    document = asyncio.run(drain_gpu(find_agent(file, socket).socket, gpu, reason, evict=evict, wait_seconds=wait_seconds))
    result = read_result(document)
    _print(document, output, _drained(result))
    ctx.exit(0 if result.empty else 1)


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@agent_options
@output_option
def uncordon(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Return a GPU to service. It is offered again after a few successful health checks.

    \b
    Examples:
      gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "uncordon", gpu))
    result = read_result(document)
    state = "is back in service as soon as its health checks succeed" if result.changed else "was not cordoned"
    _print(document, output, [f"{result.gpu.label} {state}"])


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@agent_options
@output_option
def reset(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Reset a GPU that is cordoned and empty, by `nvidia-smi --gpu-reset`. It stays cordoned.

    nvidia-smi refuses while a process has the GPU open. The agent closes it for the reset; stop other monitors (DCGM) and persistence mode
    yourself. nvidia-smi reports it if several GPUs can only be reset together.

    \b
    Examples:
      gpumgr gpu drain 3 --evict --wait && gpumgr gpu reset 3 && gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "reset", gpu))
    done = f"{read_result(document).gpu.label} was reset; it is still cordoned: `gpumgr gpu uncordon` returns it to service"
    _print(document, output, [*map(printable, str(document.get("said", "")).splitlines()), done])


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@_REASON
@agent_options
@output_option
def forget(gpu: str, reason: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Forget a GPU that was removed from the machine and holds nothing: it is no longer reported as missing.

    The agent forgets a GPU by itself when another one is at its PCI address. A forgotten GPU that is installed again is offered again.

    \b
    Examples:
      gpumgr gpu forget GPU-0fe1 --reason 'sent back to the vendor'
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "forget", gpu, reason=reason))
    _print(document, output, [f"{read_result(document).gpu.label} is forgotten"])


async def _order(socket: Path, action: str, gpu: str, *, reason: str = "") -> dict[str, Any]:
    async with AgentClient(socket) as agent:
        return await request_maintenance(agent, action, gpu, reason=reason)


# -- text ----------------------------------------------------------------------------------------------------------------


def _print(document: dict[str, Any], output: str, lines: list[str]) -> None:
    click.echo(json_line(document) if output == "json" else "\n".join(lines))


def _cordoned(result: MaintenanceResult) -> list[str]:
    because = f": {result.cordon.reason}" if result.cordon and result.cordon.reason else ""
    lines = [f"{result.gpu.label} is cordoned{because}{'' if result.changed else ' (it was cordoned already)'}"]
    if result.containers:
        lines += [f"{counted(len(result.containers), 0)} on it, which continue:", *_rows(result)]
    return lines


def _drained(result: MaintenanceResult) -> list[str]:
    if result.empty:
        return [f"{result.gpu.label} is cordoned and empty"]
    still = counted(len(result.containers), len(result.unattributed)) or "nothing known, but its processes were not listed yet"
    lines = [f"{result.gpu.label} is cordoned; still on it: {still}", *_rows(result)]
    if result.evicting:
        lines.append(f"to be evicted as soon as their disruption budgets allow it: {', '.join(result.evicting)}")
    if result.not_evicted:
        lines.append(f"can't be evicted: {'; '.join(result.not_evicted)}")
    if result.unattributed:
        lines.append("end the processes that belong to no allocation yourself")
    return lines


def _rows(result: MaintenanceResult) -> Iterator[str]:
    for row in result.containers:
        size = f"{cores(row.cores)}, {memory_text(row.memory_bytes)}"
        yield f"  {row.pod_name} ({row.container or '?'})  {size}, since {clock_time(row.granted_at)}"
    for each in result.unattributed:
        yield f"  pid {each.pid}  {memory_text(each.memory_bytes)}" + (
            f", in container {each.container}" if each.container else ""
        )
