"""docs/operations.md has a remedy for each alert of config/prometheus, and names every command."""

import re

import click
import yaml

from gpumgr.cli import group
from tools import PROJECT


def test_every_alert_has_a_row_with_a_remedy() -> None:
    alerts = [
        rule["alert"]
        for file in (PROJECT / "config" / "prometheus").glob("*.yaml")
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    rows = re.findall(r"^\| `(\w+)` \| [^|]{10,} \| [^|]{10,} \|$", _section("Alerts"), re.MULTILINE)
    assert len(alerts) > 10
    assert sorted(rows) == sorted(alerts)


def test_every_command_is_named() -> None:
    named = set(re.findall(r"`(?:gpumgr )?([a-z]+)\b[^`]*`", _section("Commands")))
    assert set(group.list_commands(click.Context(group))) - named == set()


def _section(title: str) -> str:
    text = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]
