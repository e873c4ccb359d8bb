"""docs/operations.md has a remedy for each alert of config/prometheus, and names log events that exist."""

import re

import yaml

from tools import PROJECT
from tools.docs.log_calls import events


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


def test_every_log_event_with_a_remedy_exists() -> None:
    table = _section("Incidents").split("| log event |")[1]
    named = {name for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 10
    assert named - events().keys() == set()


def _section(title: str) -> str:
    text = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]
