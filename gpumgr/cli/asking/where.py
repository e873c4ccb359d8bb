"""Where a command finds this node's agent, and what the agent remembers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from gpumgr.cli.in_force import DEFAULT_CONFIG, settings_in_force

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """`checkpoint` is a folder; None: whoever named a socket means that agent, and no other's books."""

    socket: Path
    checkpoint: Path | None


def where_options(command: F) -> F:
    """The options --config and --socket; the command gets them as `file` and `socket`."""
    config = click.option(
        "--config", "file", type=click.Path(path_type=Path), help=f"Settings file.  [default: {DEFAULT_CONFIG}, if it exists]"
    )
    socket = click.option(
        "--socket", type=click.Path(path_type=Path), help="The agent's socket.  [default: http.socket of the settings]"
    )
    return config(socket(command))


def find_agent(file: Path | None, socket: Path | None) -> Where:
    """By the settings in force. Raises InputError that names every mistake in them."""
    settings = settings_in_force(file, standalone=False, assignments=())
    of_another = socket is not None and file is None
    return Where(socket=socket or settings.http.socket, checkpoint=None if of_another else settings.checkpoint.dir)
