"""The options --config and --socket, and the agent's socket and checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from gpumgr.cli.effective_settings import DEFAULT_CONFIG, effective_settings

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLocation:
    """`checkpoint` is a folder; None if only a socket was given, since the settings may belong to another agent."""

    socket: Path
    checkpoint: Path | None


def agent_options(command: F) -> F:
    """Adds --config and --socket, which the command gets as `file` and `socket`."""
    config = click.option(
        "--config", "file", type=click.Path(path_type=Path), help=f"Settings file.  [default: {DEFAULT_CONFIG}, if it exists]"
    )
    socket = click.option(
        "--socket", type=click.Path(path_type=Path), help="The agent's socket.  [default: http.socket of the settings]"
    )
    return config(socket(command))


def find_agent(file: Path | None, socket: Path | None) -> AgentLocation:
    """By the effective settings. Raises InputError, which names every mistake in them."""
    settings = effective_settings(file, standalone=False, assignments=())
    another = socket is not None and file is None
    return AgentLocation(socket=socket or settings.http.socket, checkpoint=None if another else settings.checkpoint.dir)
