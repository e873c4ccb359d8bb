"""The last things that happened, in memory, and what of them is not on disk yet.

A grant's entry is saved in the grant's own transaction, a cordon's in the cordon's; everything else follows within a moment, and is
lost if the process is killed before. Nobody waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Final, NoReturn

import structlog

from gpumgr.agent.ports import Checkpoint
from gpumgr.aio import LatestValue
from gpumgr.allocator.history import HISTORY_ENTRIES, Entry
from gpumgr.allocator.ledger import Allocation, AllocationId, Change
from gpumgr.errors import CheckpointError

log = structlog.get_logger(__name__)

#: Entries that come within this time are written together.
GATHER_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 10.0
#: How many entries back a repetition is looked for.
REPEATS_WITHIN: Final = 50
#: How many numbers a start leaves out: the agent may have been killed after it told of entries that were not saved yet.
SKIPPED_NUMBERS: Final = HISTORY_ENTRIES

#: What makes two entries say the same, all but when and what the GPUs had left. One call each: the kubelet waits.
_decisive: Final = attrgetter(
    "what",
    "code",
    "id",
    "pod",
    "pod_uid",
    "container",
    "call",
    "kind",
    "size",
    "gpus",
    "amounts",
    "evaluator",
    "why",
    "mechanisms",
)


def about(holder: Allocation, entry: Entry) -> Entry:
    """The entry with the id and the container of `holder`, and with its pod and its GPUs where the entry has none."""
    return replace(
        entry,
        id=holder.id,
        pod=entry.pod or holder.pod,
        pod_uid=entry.pod_uid or holder.uid,
        container=holder.container,
        gpus=entry.gpus or tuple(holder.gpus),
    )


class History:
    """The newest `capacity` entries, and of older ones the grants of allocations that live. `latest` holds the number of the newest, for
    whoever wants to hear of news."""

    def __init__(self, checkpoint: Checkpoint, *, capacity: int = HISTORY_ENTRIES, wall_clock: Callable[[], float]) -> None:
        self._checkpoint, self._wall_clock, self._capacity = checkpoint, wall_clock, capacity
        self._newest: deque[Entry] = deque()
        #: Of each allocation that lives the grants that are not among the newest any more.
        self._grants: dict[AllocationId, list[Entry]] = {}
        self._unsaved: deque[Entry] = deque(maxlen=capacity)
        self._news = asyncio.Event()
        self._listeners: list[Callable[[Entry], None]] = []
        self._number = 0
        self.latest = LatestValue(0)

    def restore(self, entries: Iterable[Entry], *, living: Iterable[AllocationId]) -> None:
        """After a restart: what the checkpoint kept, oldest first, and the allocations that live."""
        self._grants = {allocation: [] for allocation in living}
        for entry in entries:
            self._keep(entry)
        newest = self._newest[-1].number if self._newest else 0
        self._number = newest + SKIPPED_NUMBERS
        self.latest.set(newest)

    def subscribe(self, hear: Callable[[Entry], None]) -> None:
        """From now on `hear` is called with each entry."""
        self._listeners.append(hear)

    def entries(self) -> Sequence[Entry]:
        """Oldest first."""
        grants = [entry for entries in self._grants.values() for entry in entries]
        return (*sorted(grants, key=lambda entry: entry.number), *self._newest)

    def now(self) -> float:
        """Unix seconds."""
        return self._wall_clock()

    def numbered(self, entry: Entry) -> Entry:
        """The entry with a number of its own, and with the present time if it has none; `add` it once it is true."""
        self._number += 1
        return replace(entry, number=self._number, at=entry.at or self._wall_clock())

    def add(self, entry: Entry, *, saved: bool = False) -> None:
        """`saved`: it is on disk already. An entry without a number gets one, and the present time if it has none."""
        if not entry.number:
            entry = self.numbered(entry)
        if entry.id is not None:
            if entry.what == "granted":
                self._grants.setdefault(entry.id, [])
            elif entry.what == "freed":
                self._grants.pop(entry.id, None)
        self._keep(entry)
        for hear in self._listeners:
            hear(entry)
        self.latest.set(entry.number)
        if not saved:
            self._unsaved.append(entry)
            self._news.set()

    def add_unless_repeated(self, entry: Entry) -> None:
        """Adds it unless the like was told a moment ago: the kubelet repeats a start that was refused again and again."""
        said = _decisive(entry)
        recent = islice(reversed(self._newest), REPEATS_WITHIN)
        if not any(_decisive(before) == said for before in recent):
            self.add(entry)

    def _keep(self, entry: Entry) -> None:
        self._newest.append(entry)
        if len(self._newest) > self._capacity:
            oldest = self._newest.popleft()
            if oldest.what == "granted" and oldest.id in self._grants:
                self._grants[oldest.id].append(oldest)

    async def run(self) -> NoReturn:
        """Writes what is new, for ever. A disk that is full is told once, and tried again."""
        told = False
        while True:
            await self._news.wait()
            await asyncio.sleep(GATHER_SECONDS)
            try:
                await self.flush()
                told = False
            except CheckpointError as error:
                if not told:
                    log.error("history_not_saved", error=str(error))
                told = True
                await asyncio.sleep(RETRY_SECONDS)

    async def flush(self) -> None:
        """Writes what is new now. Raises CheckpointError, and then it is new still."""
        entries = tuple(self._unsaved)
        if entries:
            await self._checkpoint.save(Change(entries=entries))
            saved = {entry.number for entry in entries}
            self._unsaved = deque((entry for entry in self._unsaved if entry.number not in saved), maxlen=self._unsaved.maxlen)
        if not self._unsaved:
            self._news.clear()
