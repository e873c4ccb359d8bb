"""`gpumgr history`: what happened on this node, a line each, the newest last."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.allocator.pods import PodKey
from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import STATE, read_state
from gpumgr.cli.asking.following import follow_states, tell_away
from gpumgr.cli.asking.memory import Live, Memory, memory_of, newest_entries
from gpumgr.cli.asking.naming import nothing_known
from gpumgr.cli.asking.where import Where, find_agent, where_options
from gpumgr.cli.duration import duration_seconds
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.pod_word import PodWord
from gpumgr.cli.printable import printable
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
    2: "wrong usage or settings, no such GPU, or a name that several pods have",
}


@click.command(
    "history", cls=ExitingCommand, short_help="Show what happened on this node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option("-n", "newest", type=click.IntRange(min=1), help=f"At most so many.  [default: {_SHOWN}; all with --since]")
@click.option("--refused", is_flag=True, help="Only refusals.")
@click.option("--pod", metavar="POD", help="Only of this pod: NAME or NAMESPACE/NAME, as for `gpumgr why`.")
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
    wanted = Wanted(
        refused=refused,
        gpu=gpu,
        since=None if since is None else time.time() - duration_seconds(since),
        as_json=output == "json",
    )
    at_most = newest or (_SHOWN if since is None else HISTORY_ENTRIES)
    try:
        asyncio.run(_follow(where, wanted, word, at_most) if follow else _once(where, wanted, word, at_most))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _once(where: Where, wanted: Wanted, word: PodWord | None, at_most: int) -> None:
    async with memory_of(where) as memory:
        wanted = await _of_pod(wanted, word, memory)
        lines = Told(wanted).hear(await memory.entries(), memory.state)[-at_most:]
        if not lines:
            click.echo(f"gpumgr: {await _nothing(wanted, word, memory)}", err=True)
    _print(lines)


async def _of_pod(wanted: Wanted, word: PodWord | None, memory: Memory) -> Wanted:
    """Only of the pod that the word means. Raises InputError if it could be several."""
    if word is None:
        return wanted
    known = await memory.pods() if word.namespace is None else frozenset[PodKey]()
    return replace(wanted, pod=word.among(known))


async def _nothing(wanted: Wanted, word: PodWord | None, memory: Memory) -> str:
    """Why nothing is shown."""
    if word is None or wanted.pod is None:
        return "nothing of this kind is remembered"
    known = await memory.pods()
    if wanted.pod not in known:
        return nothing_known(word, known)
    return f"nothing of this kind is remembered of pod {printable('/'.join(wanted.pod))}; `gpumgr why` tells what else is known of it"


async def _follow(where: Where, wanted: Wanted, word: PodWord | None, at_most: int) -> None:
    async with AgentClient(where.socket) as agent:
        state = await agent.get(STATE)
        memory = Live(agent, state)
        told = Told(wanted := await _of_pod(wanted, word, memory))
        if word is not None and wanted.pod not in (known := await memory.pods()):
            click.echo(f"gpumgr: {nothing_known(word, known)}; waiting for {printable('/'.join(wanted.pod or ()))}", err=True)
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
