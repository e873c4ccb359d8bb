"""Prometheus's own tools read the rules and prove them on invented series."""

import shutil
import subprocess
from pathlib import Path

import yaml

from .places import PROJECT
from .prometheus import RULES, rules_of

TESTS = PROJECT / "tests" / "data" / "prometheus" / "gpumgr.rules.test.yaml"


def promtool(*arguments: str, folder: Path | None = None) -> str:
    done = subprocess.run(["/usr/bin/promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_well_formed() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_every_rule_holds_on_invented_series(tmp_path: Path) -> None:
    for file in (RULES, TESTS):
        shutil.copy(file, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", TESTS.name, folder=tmp_path)


def test_no_rule_is_without_such_a_test() -> None:
    rules = rules_of(yaml.safe_load(RULES.read_text()))
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    recorded = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    assert fired == {rule["alert"] for rule in rules if "alert" in rule}
    assert recorded == {rule["record"] for rule in rules if "record" in rule}
