"""How commands end, as each says in its --help."""

import re
from collections.abc import Iterator
from typing import Final

import click

from gpumgr.cli import group
from gpumgr.cli.run import EXIT_CODES
from tests.docs.markdown import code, table

_LINE: Final = re.compile(r"  (\d)  (\S.*)")


def agent_table() -> str:
    """Of `gpumgr run`."""
    return table(("code", "why the agent ended"), ((str(number), why) for number, why in EXIT_CODES.items()))


def commands_table() -> str:
    """Of the other commands that tell of theirs."""
    return table(("command", "0", "1", "2"), _rows())


def _rows() -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        told = dict(_LINE.findall(command.epilog or ""))
        if told and name != "run":
            yield (code(f"gpumgr {name}"), *(told.get(number, "") for number in "012"))
