"""`gpumgr history`: the history of this node, one line per entry, the newest last."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final, Literal

import click
import msgspec
from msgspec.structs import replace

from gpumgr.cli.agent_client import STATE, AgentClient, follow_states, read_entries, read_state, report_unavailable
from gpumgr.cli.formats import clock_time, json_line, printable
from gpumgr.cli.gpu_labels import GpuLabels, gpus_of
from gpumgr.cli.node_data import AgentData, Document, NodeData, find_pod, open_node_data
from gpumgr.cli.options import AgentLocation, ExitingCommand, PodName, agent_options, unknown_pod_message
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.units import GpuName, count_text
from gpumgr.ledger.history import HISTORY_ENTRIES, HistoryEntry, What
from gpumgr.placement.pods import PodKey

#: How many entries are shown without -n and --since.
_SHOWN: Final = 20
#: How many more entries are requested than the last state counts: new ones may have been recorded since.
_SPARE: Final = 50
_COLORS: Final[dict[What, str]] = {"granted": "green", "refused": "red", "event": "yellow", "gpu": "yellow", "config": "yellow"}
_UNIT_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhms])")
_EPILOG: Final = """
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


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """An entry must satisfy all conditions; None: no condition. `gpu`: as users name it. `since`: in unix seconds."""

    refused: bool = False
    pod: PodKey | None = None
    gpu: str | None = None
    since: float | None = None
    as_json: bool = False


class HistoryFilter:
    """Keeps the entries that were read. `last`: the number of the newest of these entries. Entries up to this number are not printed
    again."""

    def __init__(self, query: HistoryQuery) -> None:
        self._query = query
        self._entries: deque[HistoryEntry] = deque(maxlen=HISTORY_ENTRIES)
        self._gpu: GpuName | None = None
        self.last = 0

    def lines(self, documents: list[Document], state: Document) -> list[str]:
        """Lines for the new entries, oldest first. Raises InputError for an unknown GPU."""
        read = zip(documents, read_entries(documents), strict=True)
        new = [(document, entry) for document, entry in read if entry.number > self.last]
        self._entries.extend(entry for _, entry in new)
        self.last = max((entry.number for _, entry in new), default=self.last)
        shown = read_state(state)
        gpus = gpus_of(shown.gpus, self._entries, failures=shown.failures)
        if self._query.gpu is not None and self._gpu is None:  # a restarted agent that waits for the driver knows no indices
            self._gpu = gpus.find(self._query.gpu)
        # An allocation's first entries may have neither name nor UID of the pod, but another entry may have them.
        ids = {entry.id for entry in self._entries if entry.id and entry.pod is not None and entry.pod == self._query.pod}
        chosen = [(document, entry) for document, entry in new if self._matches(entry, ids)]
        return [json_line(document) if self._query.as_json else history_line(entry, gpus) for document, entry in chosen]

    def _matches(self, entry: HistoryEntry, ids: Collection[str | None]) -> bool:
        """`ids`: the allocations of the query's pod."""
        query = self._query
        return (
            (not query.refused or entry.what == "refused")
            and (query.pod is None or entry.pod == query.pod or (entry.pod is None and entry.id in ids))
            and (self._gpu is None or self._gpu in entry.gpus)
            and (query.since is None or entry.at >= query.since)
        )


def history_line(entry: HistoryEntry, gpus: GpuLabels) -> str:
    """Time, kind of event (coloured), pod (container), size, GPUs and reason, separated by two blanks; "-" for an empty field."""
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
    location: AgentLocation,
    output: Literal["text", "json"],
) -> None:
    """Show the history of this node: time, kind of event, pod (container), size, GPUs, reason. The newest entry is the last.

    The agent keeps the last 1000 entries. If it does not respond, they are read from its checkpoint (not with --follow).
    """
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


def duration_seconds(text: str) -> float:
    """A duration such as 90s, 10m, 1h30m or 2d. Raises InputError."""
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(
            f"'{printable(text)}' is not a duration: expected numbers with d, h, m or s, for example 90s, 1h30m or 2d"
        )
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


async def _once(location: AgentLocation, query: HistoryQuery, name: PodName | None, limit: int) -> None:
    async with open_node_data(location) as data:
        query = query if name is None else replace(query, pod=await find_pod(data, name))
        lines = HistoryFilter(query).lines(await data.entries(), data.state)[-limit:]
        if not lines:
            click.echo(f"gpumgr: {await _nothing_found(query, name, data)}", err=True)
    _print(lines)


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
        query = query if name is None else replace(query, pod=await find_pod(data, name))
        history = HistoryFilter(query)
        if name is not None and query.pod not in (known := await data.pods()):
            pod = printable("/".join(query.pod or ()))
            click.echo(f"gpumgr: {unknown_pod_message(name, known)}; waiting for {pod}", err=True)
        _print(history.lines(await data.entries(), state)[-limit:])
        async for state in follow_states(agent, report_unavailable):
            newest = max((entry.number for entry in read_state(state).history), default=0)
            if newest < history.last:
                history.last = newest  # the agent was killed before it saved the last entries, and continues from this number
            elif newest > history.last:
                try:
                    documents = await data.entries(min(newest - history.last + _SPARE, HISTORY_ENTRIES))
                except GpumgrError:
                    continue  # the agent is unavailable; the next state arrives when it is back
                _print(history.lines(documents, state))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
