"""What a person sees who asks the command what it can do."""

import re
from collections.abc import Iterator

import click
from click.testing import CliRunner

from gpumgr.cli import group


def test_each_command_is_said_whole_on_one_line() -> None:
    text = CliRunner().invoke(group, ["--help"]).stdout
    told = text.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in told] == group.list_commands(group.make_context("gpumgr", ["demo"]))
    assert not [line for line in told if "..." in line or not line.endswith(".")]


def commands(command: click.Command, name: str = "gpumgr") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from commands(found, f"{name} {each}")


def test_each_command_with_a_settings_option_documents_the_default_path() -> None:
    told = {
        name: option.help or ""
        for name, command in commands(group)
        for option in command.params
        if isinstance(option, click.Option) and "--config" in option.opts
    }
    assert {"gpumgr run", "gpumgr checkpoint show", "gpumgr config show", "gpumgr doctor", "gpumgr healthy"} <= set(told)
    # Not the default's own name: a command that was first asked in a test may have that test's.
    assert {name for name, text in told.items() if not re.search(r"\[default: /\S+/gpumgr\.yaml, if it exists\]$", text)} == set()


def test_the_help_of_each_command_has_examples_that_begin_where_the_text_begins() -> None:
    for name, command in commands(group):
        text, _, examples = command.get_help(click.Context(command, info_name=name)).partition("\n  Examples:\n")
        assert text, name
        assert examples.startswith("    gpumgr"), name
        assert f" {name}" in examples, name
