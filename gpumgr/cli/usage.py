"""`gpumgr usage`: what containers hold of this node's GPUs, and what they use."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import click
from rich.console import Console

from gpumgr.cli.client.agent_client import AgentClient, follow_states, read_state, report_unavailable
from gpumgr.cli.client.node_data import open_node_data
from gpumgr.cli.options import AgentLocation, ExitingCommand, agent_options
from gpumgr.cli.rendering.formats import json_line
from gpumgr.cli.rendering.gpu_labels import gpus_of
from gpumgr.cli.rendering.tables import show
from gpumgr.cli.rendering.usage_table import Screen, usage_tables

_EPILOG = """
\b
Columns:
  CORES   granted, in hundredths of a GPU    BUSY  share of the last second in which kernels ran
  MEMORY  granted (GPU: of what it offers)   USED  memory in use
  HELD    hundredths of the last ten seconds in which it had the GPU, of CORES
  WAITED  share of these seconds in which its work waited for a turn
  LIMITS  whether the container stays within its memory, and what limits it

\b
Examples:
  gpumgr usage
  gpumgr usage --watch --namespace team
  gpumgr usage --gpu 3 --output json | jq '.containers[].pod'
"""
_Filter = Callable[[dict[str, Any]], dict[str, Any]]

_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--watch: the agent does not respond)",
    2: "wrong usage or settings, or no such GPU",
}


@click.command(
    "usage",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.option("--watch", is_flag=True, help="Show each new state, on a terminal on a screen of its own, until Ctrl-C.")
@click.option("--gpu", metavar="GPU", help="Only this GPU: its index, or the beginning of its UUID.")
@click.option("--namespace", metavar="NS", help="Only containers of this namespace.")
@agent_options
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: one line per state."
)
def command(
    watch: bool, gpu: str | None, namespace: str | None, location: AgentLocation, output: Literal["text", "json"]
) -> None:
    """Show this node's GPUs and the containers on them: what each was granted, and what it uses now.

    If the agent does not respond, the grants are read from its checkpoint (not with --watch); the rest is then not known.
    """
    rows, as_json = partial(_filtered, gpu=gpu, namespace=namespace), output == "json"
    if not watch:
        asyncio.run(_once(location, rows, as_json=as_json))
        return
    live = not as_json and sys.stdout.isatty() and not Console().is_dumb_terminal
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            _until_signalled(_live(location.socket, rows)) if live else _print_each(location.socket, rows, as_json=as_json)
        )


def _filtered(document: dict[str, Any], *, gpu: str | None, namespace: str | None) -> dict[str, Any]:
    """The state with only the matching rows; `gpu` is an index, name or UUID. Raises InputError for an unknown GPU, GpumgrError for another
    document."""
    shown = read_state(document)
    gpus, containers = document["gpus"], document["containers"]
    if gpu is not None:
        name = gpus_of(shown.gpus, failures=shown.failures).find(gpu)
        gpus = [row for row in gpus if row["name"] == name]
        containers = [row for row in containers if row["gpu"] == name]
    if namespace is not None:
        containers = [row for row in containers if row.get("namespace") == namespace]
    return {**document, "gpus": gpus, "containers": containers}


async def _once(location: AgentLocation, rows: _Filter, *, as_json: bool) -> None:
    async with open_node_data(location) as data:
        _print(rows(data.state), as_json=as_json, live=data.live)


async def _print_each(socket: Path, rows: _Filter, *, as_json: bool) -> None:
    async with AgentClient(socket) as agent:
        async for document in follow_states(agent, report_unavailable):
            _print(rows(document), as_json=as_json)
            if not as_json:
                click.echo()


async def _until_signalled(live: Coroutine[Any, Any, None]) -> None:
    """SIGTERM and the end of the terminal restore the screen, as Ctrl-C does."""
    task = asyncio.ensure_future(live)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _live(socket: Path, rows: _Filter) -> None:
    async with AgentClient(socket) as agent:
        with Screen(Console(highlight=False)) as screen:
            async for document in follow_states(agent, screen.unavailable):
                screen.show(read_state(rows(document)))


def _print(document: dict[str, Any], *, as_json: bool, live: bool = True) -> None:
    if as_json:
        shown = {key: document.get(key) for key in ("node", "at", "not_ready", "failures", "gpus", "containers")}
        click.echo(json_line({"live": live, **shown}))
    else:
        state = read_state(document)
        show(lambda width: usage_tables(state, width))
