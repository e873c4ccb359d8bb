"""Prometheus' own linter finds nothing in our metrics.

Only ours: gpu-manager's container_gpu_memory_total is a gauge, and its name can't change; HAMi's names are no better.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumgr.common.prometheus_text import page
from gpumgr.settings.schema import MetricsSettings
from gpumgr.web.metrics import Metrics
from tests.unit.web.metrics.pages import full_picture
from tests.unit.web.metrics.pictures import uuid_of

from .places import PROJECT
from .prometheus import DASHBOARD, RULES, SCHEDULER_RULES, rules_of

FILES = [(rules, PROJECT / "tests" / "data" / "prometheus" / f"{rules.stem}.test.yaml") for rules in (RULES, SCHEDULER_RULES)]


def promtool(*arguments: str, folder: Path | None = None) -> str:
    done = subprocess.run(["/usr/bin/promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("rules", "tests"), FILES)
def test_rules_on_synthetic_series(rules: Path, tests: Path, tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(rules))
    for file in (rules, tests):
        shutil.copy(file, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", tests.name, folder=tmp_path)


@pytest.mark.parametrize(("file", "cases"), FILES)
def test_every_rule_has_a_test(file: Path, cases: Path) -> None:
    rules = rules_of(yaml.safe_load(file.read_text()))
    tests = yaml.safe_load(cases.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    recorded = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    assert fired == {rule["alert"] for rule in rules if "alert" in rule}
    assert recorded == {rule["record"] for rule in rules if "record" in rule}


def complaints(text: bytes) -> str:
    """What `promtool check metrics` says of a page in the classic format; "" if it is content."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    told = (done.stdout + done.stderr).decode()
    return told or f"promtool ended with {done.returncode}" * bool(done.returncode)


def test_promtool_accepts_the_metrics() -> None:
    metrics = Metrics(node="node-1", version="1", names=MetricsSettings(gpu_manager_names=False))
    metrics.set_report(full_picture())
    metrics.xid(uuid_of(0), 79)
    assert complaints(page(metrics.render(), openmetrics=False)) == ""


def test_promtool_rejects_bad_metrics() -> None:
    assert "non-counter metrics should not have" in complaints(b"# HELP x_total It grows.\n# TYPE x_total gauge\nx_total 1\n")
    assert complaints(b"x{") != ""


#: One XID at 2:00 of a GPU that had none, and another at 2:30; one that an agent counted before it started again, three by then and
#: one after it; and an old one.
SERIES = {
    '{instance="n1", gpu="GPU-a", xid="79"}': "_x119 1x29 2x150",
    '{instance="n1", gpu="GPU-b", xid="48"}': "3x100 _x19 1x179",
    '{instance="n1", gpu="GPU-c", xid="31"}': "1x300",
}
#: When -> what the panel shows of each, in this order; None: nothing.
SHOWN = {
    "1h30m": (None, 0, 0),
    "2h10m": (1, 1, 0),
    "2h50m": (2, 1, 0),
    "3h20m": (1, 0, 0),
    "4h": (0, 0, 0),
}


def panel_queries(title: str) -> list[str]:
    (panel,) = (panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["title"] == title)
    queries = [str(target["expr"]) for target in panel["targets"]]
    for variable, value in (("$instance", ".*"), ("$namespace", ".*"), ("$__rate_interval", "5m")):
        queries = [query.replace(variable, value) for query in queries]
    return queries


def prove(case: dict[str, Any], folder: Path) -> None:
    """Runs the case of promtool's unit tests, without rules."""
    tests = {"rule_files": [], "evaluation_interval": "1m", "tests": [{"interval": "1m", **case}]}
    (folder / "dashboard.yaml").write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in promtool("test", "rules", "dashboard.yaml", folder=folder)


def test_the_first_xid_of_a_gpu_shows(tmp_path: Path) -> None:
    """Its series begins with it, at 1: to `increase` alone nothing happened."""
    (query,) = panel_queries("XID errors")
    query = f"round({query})"  # `increase` extrapolates to the ends of its window
    case = {
        "input_series": [
            {"series": f"gpumgr_gpu_xid_events_total{labels}", "values": values} for labels, values in SERIES.items()
        ],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": when,
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in zip(SERIES, values, strict=True) if value is not None
                ],
            }
            for when, values in SHOWN.items()
        ],
    }
    prove(case, tmp_path)


def test_turns_show_where_the_limiter_limits(tmp_path: Path) -> None:
    """Nothing of the demo is limited by turns, so test_prometheus.py has no data for these panels."""
    limited, other = (f'{{instance="n1", namespace="demo", pod="{pod}", container="main", gpu="GPU-a"}}' for pod in "ab")
    (held, share), (waited,) = panel_queries("Time held against share"), panel_queries("Time waited for the turn")
    share_of_a = f"gpumgr_container_core_limit_ratio{limited}"
    case = {
        "input_series": [
            {"series": f"gpumgr_container_held_seconds_total{limited}", "values": "0+15x20"},
            {"series": f"gpumgr_container_waited_seconds_total{limited}", "values": "0+30x20"},
            *({"series": f"gpumgr_container_core_limit_ratio{labels}", "values": "0.25x20"} for labels in (limited, other)),
        ],
        "promql_expr_test": [
            {"expr": query, "eval_time": when, "exp_samples": [{"labels": labels, "value": value}]}
            for query, when, labels, value in (
                (held, "10m", limited, 0.25),
                (share, "10m", share_of_a, 0.25),
                (waited, "10m", limited, 0.5),
            )
        ],
    }
    prove(case, tmp_path)


def test_states_of_suspended_containers_are_counted(tmp_path: Path) -> None:
    """The demo suspends no container."""
    (states,) = panel_queries("Suspended containers")
    series = [
        f'gpumgr_container_suspension{{instance="n1", namespace="demo", pod="{pod}", container="main", gpu="GPU-a", state="{state}"}}'
        for pod, state in (("a", "suspended"), ("b", "suspended"), ("c", "failed"))
    ]
    case = {
        "input_series": [{"series": each, "values": "1x20"} for each in series],
        "promql_expr_test": [
            {
                "expr": states,
                "eval_time": "10m",
                "exp_samples": [{"labels": '{state="failed"}', "value": 1}, {"labels": '{state="suspended"}', "value": 2}],
            }
        ],
    }
    prove(case, tmp_path)
