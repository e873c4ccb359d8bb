"""Keeps the newest history entries in memory, and writes them to disk.

The entry of a saved change (a grant, a resize, a cordon) is saved in the change's transaction. Others are saved within a second, and are
lost if the process is killed before that.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NoReturn

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.ports import Checkpoint
from gpumgr.common.aio import LogPace
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.common.units import Resource
from gpumgr.ledger.callers import UNKNOWN_CALLER, Caller
from gpumgr.ledger.history import HISTORY_ENTRIES, Call, Candidate, HistoryEntry, What
from gpumgr.ledger.ledger import Allocation, AllocationId, Change

log = structlog.get_logger(__name__)

GATHER_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 10.0
#: How many of the newest entries are searched for a repetition.
REPEATS_WITHIN: Final = 50
#: How many numbers are skipped at each start: clients may have received entries with these numbers, which were never saved.
SKIPPED_NUMBERS: Final = HISTORY_ENTRIES


def _content(entry: HistoryEntry) -> HistoryEntry:
    return replace(entry, number=0, at=0.0, candidates=())


def about(holder: Allocation, entry: HistoryEntry) -> HistoryEntry:
    """The entry with the allocation's id and container; also with its pod and GPUs if the entry has none."""
    return replace(
        entry,
        id=holder.id,
        pod=entry.pod or holder.pod,
        pod_uid=entry.pod_uid or holder.uid,
        container=holder.container,
        gpus=entry.gpus or tuple(holder.gpus),
    )


class History:
    """The newest `capacity` entries, and the older grants of existing allocations."""

    def __init__(self, checkpoint: Checkpoint, *, capacity: int = HISTORY_ENTRIES, wall_clock: Callable[[], float]) -> None:
        self._checkpoint, self._wall_clock, self._capacity = checkpoint, wall_clock, capacity
        self._newest: deque[HistoryEntry] = deque()
        #: The grants of existing allocations that are too old for `_newest`.
        self._grants: dict[AllocationId, list[HistoryEntry]] = {}
        self._unsaved: deque[HistoryEntry] = deque(maxlen=capacity)
        self._news = asyncio.Event()
        self._listeners: list[Callable[[HistoryEntry], None]] = []
        self._number = 0

    def restore(self, entries: Iterable[HistoryEntry], *, allocations: Iterable[AllocationId]) -> None:
        """`entries`: the checkpoint's, oldest first. `allocations`: the existing ones."""
        self._grants = {allocation: [] for allocation in allocations}
        for entry in entries:
            self._keep(entry)
        self._number = (self._newest[-1].number if self._newest else 0) + SKIPPED_NUMBERS

    def subscribe(self, listener: Callable[[HistoryEntry], None]) -> None:
        self._listeners.append(listener)

    def entries(self) -> Sequence[HistoryEntry]:
        """Oldest first."""
        grants = [entry for entries in self._grants.values() for entry in entries]
        return (*sorted(grants, key=lambda entry: entry.number), *self._newest)

    def now(self) -> float:
        """Unix seconds."""
        return self._wall_clock()

    def numbered(self, entry: HistoryEntry) -> HistoryEntry:
        """The entry with the next number; the caller adds it once the change is made."""
        self._number += 1
        return replace(entry, number=self._number, at=entry.at or self._wall_clock())

    def add(self, entry: HistoryEntry, *, saved: bool = False) -> None:
        """`saved`: the entry is on disk already. An entry without a number gets one."""
        if not entry.number:
            entry = self.numbered(entry)
        if entry.id is not None:
            if entry.what == "granted":
                self._grants.setdefault(entry.id, [])
            elif entry.what == "freed":
                self._grants.pop(entry.id, None)
        self._keep(entry)
        for listener in self._listeners:
            listener(entry)
        if not saved:
            self._unsaved.append(entry)
            self._news.set()

    def add_unless_repeated(self, entry: HistoryEntry) -> None:
        """Adds the entry unless a recent one has the same content: the kubelet repeats a refused start many times."""
        content = _content(entry)
        if not any(_content(before) == content for before in islice(reversed(self._newest), REPEATS_WITHIN)):
            self.add(entry)

    def _keep(self, entry: HistoryEntry) -> None:
        self._newest.append(entry)
        if len(self._newest) > self._capacity:
            oldest = self._newest.popleft()
            if oldest.what == "granted" and oldest.id in self._grants:
                self._grants[oldest.id].append(oldest)

    async def run(self) -> NoReturn:
        """Saves new entries shortly after they are added. A failed write is retried."""
        pace = LogPace()
        while True:
            await self._news.wait()
            await asyncio.sleep(GATHER_SECONDS)
            try:
                await self.flush()
            except CheckpointError as error:
                if pace.due():
                    log.error("history_not_saved", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def flush(self) -> None:
        """Raises CheckpointError; then the entries stay unsaved."""
        entries = tuple(self._unsaved)
        if entries:
            await self._checkpoint.save(Change(entries=entries))
            saved = {entry.number for entry in entries}
            self._unsaved = deque((entry for entry in self._unsaved if entry.number not in saved), maxlen=self._unsaved.maxlen)
        if not self._unsaved:
            self._news.clear()


class CallRecord(msgspec.Struct, kw_only=True):
    """One call of the kubelet, filled in while it is decided. `id`: the allocation that the call concerns, or would make."""

    call: Call
    resource: Resource
    size: int
    id: AllocationId
    caller: Caller = UNKNOWN_CALLER
    candidates: tuple[Candidate, ...] = ()

    def refused(self, refusal: Refusal) -> HistoryEntry:
        who = self.caller
        entry = replace(self._entry("refused"), id=self.id, pod=who.pod, pod_uid=who.uid, container=who.container)
        return replace(entry, why=str(refusal), code=refusal.code)

    def granted(self, allocation: Allocation, evaluator: str | None) -> HistoryEntry:
        entry = replace(self._entry("granted"), amounts=allocation.gpus, evaluator=evaluator, why=allocation.why)
        return about(allocation, replace(entry, mechanisms=allocation.mechanisms))

    def _entry(self, what: What) -> HistoryEntry:
        return HistoryEntry(what=what, call=self.call, kind=self.resource, size=self.size, candidates=self.candidates)
