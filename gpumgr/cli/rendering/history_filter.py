"""The history entries that `gpumgr history` prints, one on each line. The texts of the entries are printable."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import click

from gpumgr.cli.client.node_data import Document
from gpumgr.cli.client.schema import read_entries, read_state
from gpumgr.cli.printable import json_line
from gpumgr.cli.rendering.formats import clock_time, cores
from gpumgr.cli.rendering.gpu_labels import GpuLabels, gpus_of
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HISTORY_ENTRIES, HistoryEntry, What
from gpumgr.ledger.pods import PodKey

_COLORS: Final[dict[What, str]] = {"granted": "green", "refused": "red", "event": "yellow", "gpu": "yellow", "config": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Only refusals, of one pod, about one GPU (by a name for people), since a time (unix seconds). None: no restriction."""

    refused: bool = False
    pod: PodKey | None = None
    gpu: str | None = None
    since: float | None = None
    as_json: bool = False


class HistoryFilter:
    """Keeps the entries that were read. `last` is the newest one's number; older ones are not printed again."""

    def __init__(self, query: HistoryQuery) -> None:
        self._query = query
        self._entries: deque[HistoryEntry] = deque(maxlen=HISTORY_ENTRIES)
        self.last = 0

    def lines(self, documents: list[Document], state: Document) -> list[str]:
        """Lines for the new entries, oldest first. Raises InputError for an unknown GPU."""
        read = list(zip(documents, read_entries(documents), strict=True))
        new = [(document, entry) for document, entry in read if entry.number > self.last]
        self._entries.extend(entry for _, entry in new)
        self.last = max((entry.number for _, entry in new), default=self.last)
        shown = read_state(state)
        gpus = gpus_of(shown.gpus, self._entries, failures=shown.failures)
        gpu = gpus.find(self._query.gpu) if self._query.gpu is not None else None
        chosen = choose((entry for _, entry in new), self._query, gpu=gpu, known=self._entries)
        if self._query.as_json:
            numbers = {entry.number for entry in chosen}
            return [json_line(document) for document, entry in new if entry.number in numbers]
        return [history_line(entry, gpus) for entry in chosen]


def choose(
    entries: Iterable[HistoryEntry], query: HistoryQuery, *, gpu: GpuName | None, known: Iterable[HistoryEntry]
) -> list[HistoryEntry]:
    """The entries that match. An allocation's first entries may have neither name nor UID of the pod; `known` are all entries, one of
    which may have it."""
    ids = {entry.id for entry in known if entry.id and query.pod is not None and entry.pod == query.pod}
    return [
        entry
        for entry in entries
        if (not query.refused or entry.what == "refused")
        and (query.pod is None or entry.pod == query.pod or (entry.pod is None and entry.id in ids))
        and (gpu is None or gpu in entry.gpus)
        and (query.since is None or entry.at >= query.since)
    ]


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
    if entry.kind == "core":
        return cores(entry.size)
    return f"{entry.size} {'block' if entry.kind == 'memory' else 'GPU'}{'' if entry.size == 1 else 's'}"


def _reason(entry: HistoryEntry) -> str:
    return ": ".join(part for part in (entry.evaluator or entry.code, entry.why) if part)
