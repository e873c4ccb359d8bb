"""What Prometheus's own tool makes of the dashboard's queries, on invented series."""

import json
from pathlib import Path

import yaml

from .prometheus import DASHBOARD
from .test_rules import promtool

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


def panel_query(title: str) -> str:
    (panel,) = (panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["title"] == title)
    (target,) = panel["targets"]
    query: str = target["expr"]
    return query.replace("$instance", ".*")


def test_the_first_xid_of_a_gpu_shows(tmp_path: Path) -> None:
    """Its series begins with it, at 1: to `increase` alone nothing happened."""
    query = f"round({panel_query('XID errors')})"  # `increase` extrapolates to the ends of its window
    case = {
        "interval": "1m",
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
    (tmp_path / "dashboard.yaml").write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", "dashboard.yaml", folder=tmp_path)
