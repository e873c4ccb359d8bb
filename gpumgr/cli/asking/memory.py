"""Who can tell what happened on this node: the running agent, or without one what it left in its checkpoint.

Both give the agent's documents, out of the same functions; what only a running agent knows is null in the checkpoint's.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import click

from gpumgr.agent.inventory import Inventory
from gpumgr.agent.picture import Picture
from gpumgr.agent.writer import AgentView
from gpumgr.allocator.history import HISTORY_ENTRIES
from gpumgr.allocator.ledger import Ledger
from gpumgr.checkpoint.reader import read_checkpoint
from gpumgr.checkpoint.tables import Loaded
from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import STATE
from gpumgr.cli.asking.where import Where
from gpumgr.cli.printable import printable
from gpumgr.errors import GpumgrError, InputError
from gpumgr.web.state import entry_fields, state_document
from gpumgr.web.story import story

Document = dict[str, Any]


class Memory(Protocol):
    """`live`: it is the agent that tells, and it knows of this moment. `state` is as /api/state. All calls raise GpumgrError."""

    live: bool
    state: Document

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        """Entries with their candidates, oldest first."""
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

    async def story(self, namespace: str, pod: str) -> Document | None:
        try:
            document: Document = await self._agent.get(f"/api/pods/{quote(namespace, safe='')}/{quote(pod, safe='')}")
        except InputError:
            return None
        return document


class Remembered:
    """A checkpoint that was read."""

    live = False

    def __init__(self, loaded: Loaded) -> None:
        self._picture, self._history = _picture_of(loaded.ledger), loaded.history
        self.state: Document = state_document(self._picture, self._history)

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        return [
            {**entry_fields(entry), "candidates": [asdict(gpu) for gpu in entry.candidates]} for entry in self._history[-newest:]
        ]

    async def story(self, namespace: str, pod: str) -> Document | None:
        return story(self._picture, None, namespace, pod, self._history)


@asynccontextmanager
async def memory_of(where: Where) -> AsyncIterator[Memory]:
    """The agent if it answers; if it does not, its checkpoint, and a line on stderr that says so.

    Raises GpumgrError if there is neither.
    """
    async with AgentClient(where.socket) as agent:
        try:
            live = Live(agent, await agent.get(STATE))
        except GpumgrError as error:
            away = str(error)
        else:
            yield live
            return
    remembered = Remembered(await _load(where.checkpoint, away))
    click.echo(f"gpumgr: {printable(away)}. What follows is what the checkpoint in {where.checkpoint} remembers.", err=True)
    yield remembered


async def newest_entries(agent: AgentClient, count: int) -> list[Document]:
    """The newest entries with their candidates, oldest first. Raises GpumgrError."""
    documents: list[Document] = await agent.get(f"/api/history?limit={count}")
    return documents[::-1]


async def _load(folder: Path, away: str) -> Loaded:
    """Raises GpumgrError with both reasons."""
    try:
        loaded = await asyncio.to_thread(read_checkpoint, folder)
    except GpumgrError as error:
        raise GpumgrError(f"{away}; and without it: {error}") from error
    if loaded.lost:
        raise GpumgrError(f"{away}; and without it: {loaded.why}")
    return loaded


def _picture_of(ledger: Ledger) -> Picture:
    """The books, and nothing of the hardware."""
    inventory = Inventory()
    return Picture(
        view=AgentView(ledger=ledger, inventory=inventory, node=inventory.view(ledger.cards, policy="binpack", visible_blocks={}))
    )
