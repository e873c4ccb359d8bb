"""Who can tell what happened on this node: the running agent, or without one what it left in its checkpoint.

Both give the agent's documents, out of the same functions; what only a running agent knows is null in the checkpoint's.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import click

from gpumgr.agent.cordons import CORDONS_NOTE, Cordon, decode_cordons
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.picture import Picture
from gpumgr.agent.writer import AgentView
from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.allocator.pods import PodKey
from gpumgr.checkpoint.files import NAME
from gpumgr.checkpoint.reader import read_checkpoint
from gpumgr.checkpoint.tables import Loaded
from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import PODS, STATE, read_pods
from gpumgr.cli.asking.where import Where
from gpumgr.cli.printable import printable
from gpumgr.cli.showing.amounts import clock_time
from gpumgr.errors import CheckpointError, GpumgrError, InputError
from gpumgr.web.state import entry_fields, state_document
from gpumgr.web.story import known_pods, story

Document = dict[str, Any]


class Memory(Protocol):
    """`live`: it is the agent that tells, and it knows of this moment. `state` is as /api/state. All calls raise GpumgrError."""

    live: bool
    state: Document

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        """Entries with their candidates, oldest first."""
        ...

    async def pods(self) -> frozenset[PodKey]:
        """Of which there is a story."""
        ...

    async def story(self, namespace: str, pod: str) -> Document | None:
        """As /api/pods/{namespace}/{pod}; None if nothing is known."""
        ...


class Live:
    """The agent."""

    live = True

    def __init__(self, agent: AgentClient, state: Document) -> None:
        self._agent, self.state = agent, state

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        return await newest_entries(self._agent, newest)

    async def pods(self) -> frozenset[PodKey]:
        try:
            return read_pods(await self._agent.get(PODS))
        except InputError as error:
            raise GpumgrError("the agent is older than this command and can't tell which pods there are: restart it") from error

    async def story(self, namespace: str, pod: str) -> Document | None:
        try:
            document: Document = await self._agent.get(f"/api/pods/{quote(namespace, safe='')}/{quote(pod, safe='')}")
        except InputError:
            return None
        return document


class Remembered:
    """A checkpoint that was read; it was written last at `at` (unix seconds)."""

    live = False

    def __init__(self, loaded: Loaded, *, at: float) -> None:
        self._picture, self._history = _picture_of(loaded, at), loaded.history
        newest = next((entry.candidates for entry in reversed(loaded.history) if entry.candidates), ())
        self._indices = {candidate.gpu: candidate.index for candidate in newest}
        state = state_document(self._picture, self._history)
        self.state: Document = {**state, "gpus": self._gpus(state["gpus"])}

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        return [
            {**entry_fields(entry), "candidates": [asdict(gpu) for gpu in entry.candidates]} for entry in self._history[-newest:]
        ]

    async def pods(self) -> frozenset[PodKey]:
        return frozenset(known_pods(self._picture.view.ledger, (), self._history))

    async def story(self, namespace: str, pod: str) -> Document | None:
        told = story(self._picture, None, namespace, pod, self._history)
        return told and {**told, "gpus": self._gpus(told["gpus"])}

    def _gpus(self, rows: list[Document]) -> list[Document]:
        """How a GPU is now nobody knows; which number it had, the last decision knew."""
        unknown = {"healthy": None, "reason": None, "message": None}
        return [{**row, **unknown, "index": self._indices.get(row["name"])} for row in rows]


@asynccontextmanager
async def memory_of(where: Where) -> AsyncIterator[Memory]:
    """The agent if it answers; if it does not, its checkpoint, and a line on stderr that says so.

    Raises GpumgrError if there is neither.
    """
    async with AgentClient(where.socket) as agent:
        try:
            live = Live(agent, await agent.get(STATE))
        except GpumgrError as error:
            if where.checkpoint is None:
                raise
            away = str(error)
        else:
            yield live
            return
    loaded, at = await asyncio.to_thread(_load, where.checkpoint, away)
    click.echo(
        f"gpumgr: {printable(away)}. What follows is what the checkpoint in {where.checkpoint} remembers; it was written last at "
        f"{clock_time(at)}.",
        err=True,
    )
    yield Remembered(loaded, at=at)


async def newest_entries(agent: AgentClient, count: int) -> list[Document]:
    """The newest entries with their candidates, oldest first. Raises GpumgrError."""
    documents: list[Document] = await agent.get(f"/api/history?limit={count}")
    return documents[::-1]


def _load(folder: Path, away: str) -> tuple[Loaded, float]:
    """And when it was written last, in unix seconds: so long, at least, the agent was there. Raises GpumgrError with both reasons."""
    try:
        loaded = read_checkpoint(folder)
    except GpumgrError as error:
        raise GpumgrError(f"{away}; and without it: {error}") from error
    if loaded.lost:
        raise GpumgrError(f"{away}; and without it: {loaded.why}")
    files = [file for name in (NAME, f"{NAME}-wal") if (file := folder / name).exists()]
    return loaded, max((file.stat().st_mtime for file in files), default=0.0)


def _picture_of(loaded: Loaded, at: float) -> Picture:
    """The books, and nothing of the hardware."""
    ledger, inventory = loaded.ledger, Inventory()
    return Picture(
        view=AgentView(
            ledger=ledger, inventory=inventory, node=inventory.view(ledger.cards, policy="binpack", visible_blocks={})
        ),
        at=at,
        not_ready=("the agent does not answer: this is what its checkpoint remembers",),
        cordons=_cordons(loaded),
    )


def _cordons(loaded: Loaded) -> Mapping[str, Cordon]:
    """None if they can't be read: the agent itself refuses to start then, and says so."""
    try:
        return decode_cordons(loaded.notes.get(CORDONS_NOTE, "{}"))
    except CheckpointError:
        return {}
