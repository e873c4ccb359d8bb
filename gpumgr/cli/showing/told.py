"""What was heard of the node's history, and the part of it that somebody asked for."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpumgr.allocator.history import HISTORY_ENTRIES, Entry
from gpumgr.allocator.pods import PodKey
from gpumgr.cli.asking.documents import read_entries, read_state
from gpumgr.cli.asking.memory import Document
from gpumgr.cli.printable import json_line
from gpumgr.cli.showing.gpu_labels import gpus_of
from gpumgr.cli.showing.history_line import history_line
from gpumgr.units import GpuName


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be shown: only refusals, of one pod, about one GPU (as people call it), since then (unix seconds). None: all."""

    refused: bool = False
    pod: PodKey | None = None
    gpu: str | None = None
    since: float | None = None
    as_json: bool = False


class Told:
    """The entries that were heard of, as documents and as values. They may be asked for again; what was shown is not shown twice."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._told: deque[tuple[Document, Entry]] = deque(maxlen=HISTORY_ENTRIES)
        self.last = 0

    def hear(self, documents: list[Document], state: Document) -> list[str]:
        """Lines for those that are new, oldest first. Raises InputError for a GPU that is not known."""
        heard = list(zip(documents, read_entries(documents), strict=True))
        new = [(document, entry) for document, entry in heard if entry.number > self.last]
        self._told.extend(new)
        self.last = max((entry.number for _, entry in new), default=self.last)
        entries = [entry for _, entry in self._told]
        shown = read_state(state)
        gpus = gpus_of(shown.gpus, entries, failures=shown.failures)
        gpu = gpus.find(self._wanted.gpu) if self._wanted.gpu is not None else None
        chosen = choose((entry for _, entry in new), self._wanted, gpu=gpu, told=entries)
        if self._wanted.as_json:
            numbers = {entry.number for entry in chosen}
            return [json_line(document) for document, entry in new if entry.number in numbers]
        return [history_line(entry, gpus) for entry in chosen]


def choose(entries: Iterable[Entry], wanted: Wanted, *, gpu: GpuName | None, told: Iterable[Entry]) -> list[Entry]:
    """Those of `entries` that are wanted; `told` are all that are known, for one of them may tell whose another one is.

    An allocation's first entries may know neither name nor UID of the pod.
    """
    mine = [entry for entry in told if wanted.pod is not None and entry.pod == wanted.pod]
    ids = {entry.id for entry in mine if entry.id}
    return [
        entry
        for entry in entries
        if (not wanted.refused or entry.what == "refused")
        and (wanted.pod is None or entry.pod == wanted.pod or (entry.pod is None and entry.id in ids))
        and (gpu is None or gpu in entry.gpus)
        and (wanted.since is None or entry.at >= wanted.since)
    ]
