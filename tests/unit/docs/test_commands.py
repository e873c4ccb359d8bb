"""The commands in the documents exist, with the options that are shown. docs/simulate.md has the policies that can be named,
docs/operations.md every command, and a remedy for each alert of config/prometheus."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest
import yaml

from gpumgr.cli import group
from gpumgr.cluster.simulation.policies import POLICIES
from tools import PROJECT

_PAGES = [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"), *(PROJECT / "config").glob("*.md")]
_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def _commands() -> Iterator[tuple[str, str]]:
    """Page and command line, without `gpumgr`: from code spans and from lines of code blocks."""
    for page in _PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"`gpumgr ([a-z][^`]*)`", _BLOCK.sub("", text))
        for block in _BLOCK.findall(text):
            lines += re.findall(r"^ *(?:\$ |.*\| )?(?:/opt/gpumgr/bin/)?gpumgr ([a-z].*?)(?:\s+#.*)?$", block, re.MULTILINE)
        yield from ((page.name, line) for line in lines)


def _unknown(line: str) -> str | None:
    """What of a command line does not exist."""
    command: click.Command = group
    options = False
    for word in shlex.split(line):
        if re.fullmatch("--?[a-z][^ ]*", word):
            options = True
            flag = word.split("=")[0]
            if not any(flag in each.opts for each in command.get_params(click.Context(command))):
                return f"{command.name} {flag}"
        elif isinstance(command, click.Group) and not options and re.fullmatch("[a-z-]+[|a-z-]*", word):
            found = command.get_command(click.Context(command), word.split("|")[0])
            if found is None:
                return word
            command = found
    return None


def test_every_command_in_the_documents_exists() -> None:
    commands = list(_commands())
    assert len(commands) > 100
    assert [(page, line, what) for page, line in commands if (what := _unknown(line)) is not None] == []


@pytest.mark.parametrize("line", ["simulate capacity", "install systemd --force", "checkpoint print", "doctor --all", "rehearse"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert _unknown(line) is not None


def test_every_policy_of_simulations_is_described() -> None:
    text = (PROJECT / "docs" / "simulate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \|", text.split("\n## Policies\n")[1].split("\n### ")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} == set(POLICIES)


def _operations(title: str) -> str:
    """A chapter of docs/operations.md."""
    text = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_alert_has_a_row_with_a_remedy() -> None:
    alerts = [
        rule["alert"]
        for file in (PROJECT / "config" / "prometheus").glob("*.yaml")
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    rows = re.findall(r"^\| `(\w+)` \| [^|]{10,} \| [^|]{10,} \|$", _operations("Alerts"), re.MULTILINE)
    assert len(alerts) > 10
    assert sorted(rows) == sorted(alerts)


def test_every_command_is_named() -> None:
    named = set(re.findall(r"`(?:gpumgr )?([a-z]+)\b[^`]*`", _operations("Commands")))
    assert set(group.list_commands(click.Context(group))) - named == set()
