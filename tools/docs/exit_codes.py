"""The table of the agent's exit codes, and the exit codes of all commands, which `--help` shows."""

from collections.abc import Iterator, Mapping

import click

from gpumgr.cli import group
from gpumgr.cli.options import ExitingCommand
from gpumgr.cli.run import EXIT_CODES
from tools.docs.markdown import table


def agent_table() -> str:
    """The exit codes of `gpumgr run`."""
    return table(("code", "why the agent ended"), ((str(number), why) for number, why in EXIT_CODES.items()))


def exits() -> Mapping[str, Mapping[int, str]]:
    """Every command -> its exit codes, none if it does not define them; groups only if they are commands of their own."""
    return dict(_exits(click.Context(group, info_name="gpumgr"), group))


def _exits(context: click.Context, command: click.Command) -> Iterator[tuple[str, Mapping[int, str]]]:
    if not isinstance(command, click.Group) or isinstance(command, ExitingCommand):
        yield context.command_path, command.exit_codes if isinstance(command, ExitingCommand) else {}
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None, name
        yield from _exits(click.Context(below, info_name=name, parent=context), below)
