"""`gpumgr healthy`: does this node's agent live? For health checks of containers, so it is quick: no more is imported than it takes."""

import http.client
import socket as sockets
from pathlib import Path
from typing import Final

import click

from gpumgr.cli.asking.where import find_agent, where_options
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.printable import printable
from gpumgr.errors import GpumgrError

#: Shorter than what health checks are given (the image's: 3 s).
_ANSWER_SECONDS: Final = 2.0
_MOST_BYTES: Final = 4096
_EXIT_CODES: Final = {0: "it answers, and its loop runs", 1: "it does not", 2: "wrong usage or settings"}


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("agent", timeout=_ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX)
        self.sock.settimeout(_ANSWER_SECONDS)
        self.sock.connect(str(self._path))


def ask(socket: Path) -> tuple[int, str]:
    """Status and text of the agent's /healthz. Raises GpumgrError where none answers."""
    connection = _Connection(socket)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise GpumgrError(f"no agent answers at {socket}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        connection.close()


@click.command("healthy", cls=ExitingCommand, short_help="Say whether the agent lives.", exit_codes=_EXIT_CODES)
@where_options
def command(file: Path | None, socket: Path | None) -> None:
    """Ask the running agent for /healthz over its unix socket: for health checks of Docker, podman and supervisors.

    \b
    Examples:
      gpumgr healthy
      gpumgr healthy --socket /run/gpumgr/agent.sock
    """
    status, text = ask(find_agent(file, socket).socket)
    if status != http.client.OK:
        raise GpumgrError(f"the agent answers {status}: {printable(text)}")
    click.echo(printable(text))
