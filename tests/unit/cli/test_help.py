"""What a person sees who asks the command what it can do."""

from click.testing import CliRunner

from gpumgr.cli import group


def test_each_command_is_said_whole_on_one_line() -> None:
    text = CliRunner().invoke(group, ["--help"]).stdout
    told = text.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in told] == group.list_commands(group.make_context("gpumgr", ["demo"]))
    assert not [line for line in told if "..." in line or not line.endswith(".")]
