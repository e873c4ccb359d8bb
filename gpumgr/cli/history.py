"""`gpumgr history`: the history of this node, one line per entry, the newest last."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.cli.client.agent_client import AgentClient
from gpumgr.cli.client.follow import follow_states, report_unavailable
from gpumgr.cli.client.node_data import AgentData, NodeData, open_node_data
from gpumgr.cli.client.schema import STATE, read_state
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.options import AgentLocation, agent_options, find_agent
from gpumgr.cli.parameters import duration_seconds
from gpumgr.cli.pod_name import PodName, unknown_pod_message
from gpumgr.cli.printable import printable
from gpumgr.cli.rendering.history_filter import HistoryFilter, HistoryQuery
from gpumgr.common.errors import GpumgrError
from gpumgr.ledger.history import HISTORY_ENTRIES
from gpumgr.ledger.pods import PodKey

#: Without -n and --since.
_SHOWN: Final = 20
#: Requested in addition to the entries that a state has: more may have been recorded since.
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
    1: "neither agent nor checkpoint can be read (--follow: the agent does not respond)",
    2: "wrong usage or settings, no such GPU, or a name that several pods have",
}


@click.command(
    "history", cls=ExitingCommand, short_help="Show what happened on this node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option(
    "-n", "newest", type=click.IntRange(min=1), help=f"At most this number of entries.  [default: {_SHOWN}; all with --since]"
)
@click.option("--refused", is_flag=True, help="Only refusals.")
@click.option("--pod", metavar="POD", help="Only about this pod: NAME or NAMESPACE/NAME, as for `gpumgr why`.")
@click.option("--gpu", metavar="GPU", help="Only about this GPU: its index, or the beginning of its UUID.")
@click.option("--since", metavar="DURATION", help="Only from the last 90s, 10m, 1h30m, 2d.")
@click.option("--follow", is_flag=True, help="Continue with new entries; Ctrl-C ends it.")
@agent_options
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: one object per line."
)
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
    """Show the history of this node: time, kind of event, pod (container), size, GPUs, reason. The newest entry is the last.

    The agent keeps the last 1000 entries. If it does not respond, they are read from its checkpoint (not with --follow).
    """
    location = find_agent(file, socket)
    name = PodName.of(pod) if pod is not None else None
    query = HistoryQuery(
        refused=refused,
        gpu=gpu,
        since=None if since is None else time.time() - duration_seconds(since),
        as_json=output == "json",
    )
    limit = newest or (_SHOWN if since is None else HISTORY_ENTRIES)
    try:
        asyncio.run(_follow(location, query, name, limit) if follow else _once(location, query, name, limit))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _once(location: AgentLocation, query: HistoryQuery, name: PodName | None, limit: int) -> None:
    async with open_node_data(location) as data:
        query = await _with_pod(query, name, data)
        lines = HistoryFilter(query).lines(await data.entries(), data.state)[-limit:]
        if not lines:
            click.echo(f"gpumgr: {await _nothing_found(query, name, data)}", err=True)
    _print(lines)


async def _with_pod(query: HistoryQuery, name: PodName | None, data: NodeData) -> HistoryQuery:
    """Raises InputError if several pods have the name."""
    if name is None:
        return query
    known = await data.pods() if name.namespace is None else frozenset[PodKey]()
    return replace(query, pod=name.among(known))


async def _nothing_found(query: HistoryQuery, name: PodName | None, data: NodeData) -> str:
    if name is None or query.pod is None:
        return "the history has no such entry"
    known = await data.pods()
    if query.pod not in known:
        return unknown_pod_message(name, known)
    return f"the history has no such entry of pod {printable('/'.join(query.pod))}; `gpumgr why` shows what else is known of it"


async def _follow(location: AgentLocation, query: HistoryQuery, name: PodName | None, limit: int) -> None:
    async with AgentClient(location.socket) as agent:
        state = await agent.get(STATE)
        data = AgentData(agent, state)
        history = HistoryFilter(query := await _with_pod(query, name, data))
        if name is not None and query.pod not in (known := await data.pods()):
            pod = printable("/".join(query.pod or ()))
            click.echo(f"gpumgr: {unknown_pod_message(name, known)}; waiting for {pod}", err=True)
        _print(history.lines(await data.entries(), state)[-limit:])
        async for state in follow_states(agent, report_unavailable):
            newest = max((entry.number for entry in read_state(state).history), default=0)
            if newest < history.last:
                history.last = newest  # the agent was killed before it saved the rest, and continues from this number
            elif newest > history.last:
                try:
                    documents = await data.entries(min(newest - history.last + _SPARE, HISTORY_ENTRIES))
                except GpumgrError:
                    continue  # the agent is unavailable; the next state arrives when it is back
                _print(history.lines(documents, state))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
