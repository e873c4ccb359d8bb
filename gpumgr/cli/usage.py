"""`gpumgr usage`: who has what of this node's GPUs, and what he uses of it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import click
from rich.console import Console

from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import read_state
from gpumgr.cli.asking.following import follow_states, tell_away
from gpumgr.cli.asking.memory import memory_of
from gpumgr.cli.asking.where import Where, find_agent, where_options
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.printable import json_line
from gpumgr.cli.showing.gpu_labels import gpus_of
from gpumgr.cli.showing.keyboard import until_pressed
from gpumgr.cli.showing.usage_screen import Screen, on_terminal, print_usage

_EPILOG = """
\b
Columns:
  CORES   granted, in hundredths of a GPU    BUSY  share of the last second in which kernels ran
  MEMORY  granted (GPU: of what it offers)   USED  memory in use
  LIMITS  how the container keeps to its memory, and what keeps it

\b
Examples:
  gpumgr usage
  gpumgr usage --watch --namespace team
  gpumgr usage --gpu 3 --output json | jq '.containers[].pod'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--watch: the agent does not answer)",
    2: "wrong usage or settings, or no such GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """`gpu` is what people call a GPU. None: all."""

    gpu: str | None = None
    namespace: str | None = None

    def apply(self, document: dict[str, Any]) -> dict[str, Any]:
        """The state document with only the rows that are asked for.

        Raises InputError for a GPU that is not there, GpumgrError if it is no state document.
        """
        shown = read_state(document)
        gpus, containers = document["gpus"], document["containers"]
        if self.gpu is not None:
            name = gpus_of(shown.gpus, failures=shown.failures).find(self.gpu)
            gpus = [row for row in gpus if row["name"] == name]
            containers = [row for row in containers if row["gpu"] == name]
        if self.namespace is not None:
            containers = [row for row in containers if row.get("namespace") == self.namespace]
        return {**document, "gpus": gpus, "containers": containers}


@click.command(
    "usage",
    cls=ExitingCommand,
    short_help="Show who has what of this node's GPUs, and what he uses.",
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.option(
    "--watch", is_flag=True, help="Show each new state; on a terminal like top: cursor and page keys scroll, q or Ctrl-C quits."
)
@click.option("--gpu", metavar="GPU", help="Only this GPU: its index, or the beginning of its UUID.")
@click.option("--namespace", metavar="NS", help="Only containers of this namespace.")
@where_options
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: a line for each state."
)
def command(
    watch: bool, gpu: str | None, namespace: str | None, file: Path | None, socket: Path | None, output: Literal["text", "json"]
) -> None:
    """Show this node's GPUs and the containers on them: what each was granted, and what it uses now.

    Without the agent its checkpoint tells who was granted what (not with --watch); the rest is then not known.
    """
    where = find_agent(file, socket)
    wanted = Filter(gpu=gpu, namespace=namespace)
    if not watch:
        asyncio.run(_once(where, wanted, as_json=output == "json"))
        return
    try:
        if output == "text" and on_terminal():
            asyncio.run(_live(where.socket, wanted))
        else:
            asyncio.run(_again_and_again(where.socket, wanted, as_json=output == "json"))
    except KeyboardInterrupt:
        return


async def _once(where: Where, wanted: Filter, *, as_json: bool) -> None:
    async with memory_of(where) as memory:
        _print(wanted.apply(memory.state), as_json=as_json, live=memory.live)


async def _again_and_again(socket: Path, wanted: Filter, *, as_json: bool) -> None:
    async with AgentClient(socket) as agent:
        async for document in follow_states(agent, tell_away):
            _print(wanted.apply(document), as_json=as_json)
            if not as_json:
                click.echo()


async def _live(socket: Path, wanted: Filter) -> None:
    async with AgentClient(socket) as agent:
        with Screen(Console(highlight=False)) as screen:

            async def draw() -> None:
                async for document in follow_states(agent, screen.away):
                    screen.show(read_state(wanted.apply(document)))

            await until_pressed("q", draw(), hear=screen.pressed)


def _print(document: dict[str, Any], *, as_json: bool, live: bool = True) -> None:
    if as_json:
        told = {key: document.get(key) for key in ("node", "at", "not_ready", "failures", "gpus", "containers")}
        click.echo(json_line({"live": live, **told}))
    else:
        print_usage(read_state(document))
