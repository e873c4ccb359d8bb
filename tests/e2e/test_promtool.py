"""Prometheus' own linter finds nothing in our metrics.

Only ours: gpu-manager's container_gpu_memory_total is a gauge, and its name can't change; HAMi's names are no better.
"""

import subprocess

from gpumgr.metrics.registry import Metrics
from gpumgr.metrics.text_format import page
from tests.unit.metrics.pages import full_picture
from tests.unit.metrics.pictures import uuid_of


def complaints(text: bytes) -> str:
    """What `promtool check metrics` says of a page in the classic format; "" if it is content."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    told = (done.stdout + done.stderr).decode()
    return told or f"promtool ended with {done.returncode}" * bool(done.returncode)


def test_promtool_has_nothing_to_say_of_our_metrics() -> None:
    metrics = Metrics(node="node-1", version="1", gpu_manager_names=False)
    metrics.set_report(full_picture())
    metrics.xid(uuid_of(0), 79)
    assert complaints(page(metrics.render(), openmetrics=False)) == ""


def test_promtool_would_complain() -> None:
    assert "non-counter metrics should not have" in complaints(b"# HELP x_total It grows.\n# TYPE x_total gauge\nx_total 1\n")
    assert complaints(b"x{") != ""
