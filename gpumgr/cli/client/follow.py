"""The agent's states one after another, over restarts of the agent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import click

from gpumgr.cli.client.agent_client import AgentClient
from gpumgr.cli.client.schema import STREAM
from gpumgr.cli.printable import printable
from gpumgr.common.errors import GpumgrError, InputError

RETRY_SECONDS: Final = 1.0


async def follow_states(
    agent: AgentClient, on_unavailable: Callable[[str], None], *, retry_seconds: float = RETRY_SECONDS
) -> AsyncIterator[dict[str, Any]]:
    """States as in /api/state, without end. `on_unavailable` is called once with the reason each time when the agent becomes unavailable.

    Raises GpumgrError if the first connection fails, since the socket may be the wrong one.
    """
    connected = reported = False
    while True:
        reason = "the agent ended the stream of its states"
        try:
            async for document in agent.stream(STREAM):
                connected, reported = True, False
                yield document
        except InputError:
            raise
        except GpumgrError as error:
            if not connected:
                raise
            reason = str(error)
        if not reported:
            on_unavailable(reason)
            reported = True
        await asyncio.sleep(retry_seconds)


def report_unavailable(reason: str) -> None:
    """On stderr, since a program may read stdout."""
    click.echo(f"gpumgr: {printable(reason)}; trying again", err=True)
