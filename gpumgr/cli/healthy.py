"""`gpumgr healthy`: the health check of the agent's container. It imports little, so that the check is quick."""

import http.client
import socket as sockets
from contextlib import closing
from pathlib import Path
from typing import Final

import click

from gpumgr.cli.formats import printable
from gpumgr.cli.options import AgentLocation, ExitingCommand, agent_options
from gpumgr.common.errors import GpumgrError

#: Shorter than the timeout of the image's health check (3 s).
_RESPONSE_SECONDS: Final = 2.0
_MOST_BYTES: Final = 4096
_EXIT_CODES: Final = {0: "the agent is healthy", 1: "the agent is not healthy", 2: "wrong usage or settings"}


def ask(socket: Path) -> tuple[int, str]:
    """Status and text of the agent's /healthz. Raises GpumgrError if no agent responds."""
    try:
        with closing(http.client.HTTPConnection("agent")) as connection:
            connection.sock = sockets.socket(sockets.AF_UNIX)
            connection.sock.settimeout(_RESPONSE_SECONDS)
            connection.sock.connect(str(socket))
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise GpumgrError(f"no agent responds at {socket}: {getattr(error, 'strerror', None) or error}") from error


@click.command("healthy", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@agent_options
def command(location: AgentLocation) -> None:
    """Request /healthz from the running agent over its unix socket: for health checks of Docker, podman and supervisors.

    \b
    Examples:
      gpumgr healthy
      gpumgr healthy --socket /run/gpumgr/agent.sock
    """
    status, text = ask(location.socket)
    if status != http.client.OK:
        raise GpumgrError(f"the agent responds {status}: {text}")
    click.echo(printable(text))
