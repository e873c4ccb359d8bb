"""`gpumgr history`: the history of this node, one line per entry, the newest last."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.agent.api import NodeState
from gpumgr.cli.agent_client import (
    STATE,
    AgentClient,
    Document,
    GpuLabels,
    decoded,
    gpus_of,
    read_entries_of,
    read_node,
    report_unavailable,
)
from gpumgr.cli.formats import clock_time, json_line, printable
from gpumgr.cli.options import AgentLocation, ExitingCommand, PodName, agent_options
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.units import count_text
from gpumgr.ledger.history import HISTORY_ENTRIES, HistoryEntry, What
from gpumgr.placement.pods import PodKey

_COLORS: Final[dict[What, str]] = {"granted": "green", "refused": "red", "event": "yellow", "gpu": "yellow", "config": "yellow"}
#: How many entries are shown without -n and --since.
_SHOWN: Final = 20
_POLL_SECONDS: Final = 0.5
#: How many entries each poll reads: more than an agent records between two polls.
_NEWEST: Final = 200
_UNIT_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhms])")
_EPILOG: Final = """
\b
Examples:
  gpumgr history
  gpumgr history --refused --since 1h
  gpumgr history --pod team/resnet-0 --output json
  gpumgr history --follow
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--follow: the agent does not respond)",
    2: "wrong usage or settings",
}


def history_line(entry: HistoryEntry, gpus: GpuLabels) -> str:
    """Fields are separated by two blanks; "-" is an empty field."""
    what = click.style(f"{entry.what:<7}", fg=_COLORS.get(entry.what))
    cells = f"{_pod(entry):<32}  {_size(entry):<10}  {gpus.labels(entry.gpus) or '-':<6}"
    return f"{clock_time(entry.at)}  {what}  {cells}  {_reason(entry)}".rstrip()


def _pod(entry: HistoryEntry) -> str:
    if entry.pod is not None:
        who = "/".join(entry.pod)
    elif entry.pod_uid is not None:
        who = f"pod uid {entry.pod_uid}"
    else:
        who = f"allocation {entry.id}" if entry.id and entry.what != "gpu" else "-"
    return f"{who} ({entry.container})" if entry.container else who


def _size(entry: HistoryEntry) -> str:
    if not entry.kind or not entry.size:
        return "-"
    return count_text(entry.size, {"core": "core", "memory": "block"}.get(entry.kind, "GPU"))


def _reason(entry: HistoryEntry) -> str:
    return ": ".join(part for part in (entry.evaluator or entry.code, entry.why) if part)


@click.command("history", cls=ExitingCommand, epilog=_EPILOG, exit_codes=_EXIT_CODES)
@click.option(
    "-n", "newest", type=click.IntRange(min=1), help=f"At most this number of entries.  [default: {_SHOWN}; all with --since]"
)
@click.option("--refused", is_flag=True, help="Only refusals.")
@click.option("--pod", metavar="POD", type=PodName(), help="Only about this pod: NAME or NAMESPACE/NAME, as for `gpumgr why`.")
@click.option("--since", metavar="DURATION", help="Only entries of the last DURATION, for example 90s, 10m, 1h30m, 2d.")
@click.option("--follow", is_flag=True, help="Continue with new entries; Ctrl-C ends it.")
@agent_options
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: one object per line."
)
def command(
    newest: int | None,
    refused: bool,
    pod: PodKey | None,
    since: str | None,
    follow: bool,
    location: AgentLocation,
    output: Literal["text", "json"],
) -> None:
    """Show the history of this node: time, kind of event, pod (container), size, GPUs, reason. The newest entry is the last.

    The agent keeps the last 1000 entries. If it does not respond, they are read from its checkpoint (not with --follow).
    """
    oldest = 0.0 if since is None else time.time() - duration_seconds(since)
    limit = newest or (_SHOWN if since is None else HISTORY_ENTRIES)

    def lines(documents: list[Document], state: Document, after: int = 0) -> list[str]:
        gpus = gpus_of(decoded(state, NodeState).gpus)
        return [
            json_line(document) if output == "json" else history_line(entry, gpus)
            for document, entry in zip(documents, decoded(documents, list[HistoryEntry]), strict=True)
            if entry.number > after and entry.at >= oldest and (not refused or entry.what == "refused")
        ]

    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(location.socket, pod, limit, lines))
        return
    data = asyncio.run(read_node(location, pod))
    for line in (found := lines(data.entries, data.state)[-limit:]):
        click.echo(line)
    if not found:
        click.echo("gpumgr: the history has no such entry", err=True)


def duration_seconds(text: str) -> float:
    """Reads 90s, 10m, 1h30m or 2d. Raises InputError."""
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(
            f"'{printable(text)}' is not a duration: expected numbers with d, h, m or s, for example 90s, 1h30m or 2d"
        )
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


async def _follow(socket: Path, pod: PodKey | None, limit: int, lines: Callable[..., list[str]]) -> None:
    """Prints the last entries, then each new one. Raises GpumgrError if the first request fails."""
    async with AgentClient(socket) as agent:
        state, documents, available, last = await agent.get(STATE), await read_entries_of(agent, pod), True, 0
        shown = lines(documents, state)[-limit:]
        while True:
            for line in shown:
                click.echo(line)
            # The highest number falls if the agent was killed before it saved the last entries.
            last = max((entry.number for entry in decoded(documents, list[HistoryEntry])), default=0 if available else last)
            await asyncio.sleep(_POLL_SECONDS)
            try:
                documents = await read_entries_of(agent, pod, _NEWEST)
            except GpumgrError as error:
                if available:
                    report_unavailable(str(error))
                available, documents = False, []
            else:
                available = True
            shown = lines(documents, state, last)
