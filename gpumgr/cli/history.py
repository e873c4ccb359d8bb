"""`gpumgr history`: what happened on this node, a line each, the newest last."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import STATE, read_state
from gpumgr.cli.asking.following import follow_states, tell_away
from gpumgr.cli.asking.memory import memory_of, newest_entries
from gpumgr.cli.asking.where import Where, find_agent, where_options
from gpumgr.cli.duration import duration_seconds
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.pod_word import DEFAULT_NAMESPACE, PodWord
from gpumgr.cli.showing.told import Told, Wanted
from gpumgr.errors import GpumgrError

#: Without -n and --since.
_SHOWN: Final = 20
#: Asked for beside those that a state told of: more may have come since.
_SPARE: Final = 50
_EPILOG = """
\b
Examples:
  gpumgr history
  gpumgr history --refused --since 1h
  gpumgr history --pod team/resnet-0 --output json
  gpumgr history --follow --gpu 3
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--follow: the agent does not answer)",
    2: "wrong usage or settings, or no such GPU",
}


@click.command(
    "history", cls=ExitingCommand, short_help="Show what happened on this node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option("-n", "newest", type=click.IntRange(min=1), help=f"At most so many.  [default: {_SHOWN}; all with --since]")
@click.option("--refused", is_flag=True, help="Only refusals.")
@click.option("--pod", metavar="NS/NAME", help=f'Only of this pod; a name alone is in "{DEFAULT_NAMESPACE}".')
@click.option("--gpu", metavar="GPU", help="Only about this GPU: its index, or the beginning of its UUID.")
@click.option("--since", metavar="DURATION", help="Only of the last 90s, 10m, 1h30m, 2d.")
@click.option("--follow", is_flag=True, help="Go on with what happens from now on; Ctrl-C ends it.")
@where_options
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: an object a line.")
def command(
    newest: int | None,
    refused: bool,
    pod: str | None,
    gpu: str | None,
    since: str | None,
    follow: bool,
    file: Path | None,
    socket: Path | None,
    output: Literal["text", "json"],
) -> None:
    """Show what happened on this node: time, what, pod (container), size, GPUs, why. The newest comes last.

    The agent keeps the last 1000 entries. If it does not answer, its checkpoint tells (not with --follow).
    """
    where = find_agent(file, socket)
    word = PodWord.of(pod) if pod is not None else None
    told = Told(
        Wanted(
            refused=refused,
            pod=(word.namespace or DEFAULT_NAMESPACE, word.name) if word else None,
            gpu=gpu,
            since=None if since is None else time.time() - duration_seconds(since),
            as_json=output == "json",
        )
    )
    at_most = newest or (_SHOWN if since is None else HISTORY_ENTRIES)
    try:
        asyncio.run(_follow(where, told, at_most) if follow else _once(where, told, at_most))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _once(where: Where, told: Told, at_most: int) -> None:
    async with memory_of(where) as memory:
        _print(told.hear(await memory.entries(), memory.state)[-at_most:])


async def _follow(where: Where, told: Told, at_most: int) -> None:
    async with AgentClient(where.socket) as agent:
        state = await agent.get(STATE)
        _print(told.hear(await newest_entries(agent, HISTORY_ENTRIES), state)[-at_most:])
        async for state in follow_states(agent, tell_away):
            newest = max((entry.number for entry in read_state(state).history), default=0)
            if newest < told.last:
                told.last = newest  # the agent was killed before it had saved the rest; its numbers go on from here
            elif newest > told.last:
                try:
                    documents = await newest_entries(agent, min(newest - told.last + _SPARE, HISTORY_ENTRIES))
                except GpumgrError:
                    continue  # it went away; the next state comes when it is back
                _print(told.hear(documents, state))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
