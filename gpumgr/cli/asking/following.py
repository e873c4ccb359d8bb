"""The agent's states one after another, over restarts of the agent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import click

from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import STREAM
from gpumgr.cli.printable import printable
from gpumgr.errors import GpumgrError, InputError

#: Between two tries to reach an agent that went away.
RETRY_SECONDS: Final = 1.0


async def follow_states(
    agent: AgentClient, away: Callable[[str], None], *, retry_seconds: float = RETRY_SECONDS
) -> AsyncIterator[dict[str, Any]]:
    """Documents of /api/state, for ever. `away` hears once, in a sentence, that the agent went away; the next state says it is back.

    Raises GpumgrError if there was no agent in the first place: then the socket may be the wrong one.
    """
    met = told = False
    while True:
        reason = "the agent ended the stream of its states"
        try:
            async for document in agent.stream(STREAM):
                met, told = True, False
                yield document
        except InputError:
            raise
        except GpumgrError as error:
            if not met:
                raise
            reason = str(error)
        if not told:
            away(reason)
            told = True
        await asyncio.sleep(retry_seconds)


def tell_away(reason: str) -> None:
    """On stderr: who reads the lines on stdout may be a program."""
    click.echo(f"gpumgr: {printable(reason)}; trying again", err=True)
