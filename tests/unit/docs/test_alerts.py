"""The table of alerts in docs/operations.md has one row for each alert of config/prometheus, with what to do."""

import re

import yaml

from tools import PROJECT


def test_every_alert_has_a_row_with_a_remedy() -> None:
    alerts = [
        rule["alert"]
        for file in (PROJECT / "config" / "prometheus").glob("*.yaml")
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    section = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8").split("\n## Alerts\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]{10,} \| [^|]{10,} \|$", section, re.MULTILINE)
    assert len(alerts) > 10
    assert sorted(rows) == sorted(alerts)
