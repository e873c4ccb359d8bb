"""The tables of config/README.md say what the code says, and leave out nothing."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gpumgr.metrics.live import catalogue
from gpumgr.settings.live import LIVE
from gpumgr.settings.schema import sections
from gpumgr.topology.labels import gpu_labels
from tests.docs import kubernetes
from tests.docs.__main__ import README, parts
from tests.docs.markdown import fill, marks, table
from tests.docs.settings import entries, settings_tables
from tests.unit.metrics.pictures import snapshot_of

PACKAGE: Final = Path(__file__).parents[3] / "gpumgr"
#: Reasons of events and conditions. Not of such: what an entry without a code is called, and the beginning of two.
_REASON: Final = re.compile(r"(Gpu|Gpus|Gpumgr)[A-Z][A-Za-z]+")
_NO_REASON: Final = {"GpuNews", "GpumgrConfig"}
_KEY: Final = re.compile(r"(gpumgr\.io|tencent\.com)/[a-z-]+")
#: What is asked for, and how CDI calls devices: neither is written into the API server.
_NO_KEY: Final = {"tencent.com/vcuda-core", "tencent.com/vcuda-memory", "gpumgr.io/gpu"}


def literals(*packages: str) -> Iterator[str]:
    """All texts in the source of these packages that are values, not prose."""
    for package in packages:
        for file in (PACKAGE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_config_readme_is_what_the_code_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert fill(text, parts()) == text, "config/README.md is stale: run `make docs`"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    tables = settings_tables()
    for section, keys in sections().items():
        for key in keys:
            row = re.search(rf"^\| `{section}\.{key}` \| (.*) \|$", tables, re.MULTILINE)
            assert row is not None, f"{section}.{key}"
            allowed, default, meaning, change = row[1].replace("\\|", "").split(" | ")
            assert allowed
            assert default.startswith("`")
            assert len(meaning) > 10
            assert change == ("live" if f"{section}.{key}" in LIVE else "restart")


def test_every_metric_has_a_row() -> None:
    rows = [line for line in parts()["metrics"].splitlines() if line.startswith("| `")]
    assert len(rows) == len(catalogue())


def test_every_reason_in_the_code_is_told() -> None:
    told = kubernetes.events_table() + kubernetes.condition_table()
    used = {text for text in literals("agent", "allocator", "app", "kubeapi") if _REASON.fullmatch(text)}
    assert len(used) > 10
    assert {reason for reason in used - _NO_REASON if f"`{reason}`" not in told} == set()


def test_every_annotation_in_the_code_is_told() -> None:
    told = kubernetes.annotations_table() + kubernetes.labels_table()
    used = {text for text in literals("agent", "allocator", "app", "enforcement", "kubeapi", "topology") if _KEY.fullmatch(text)}
    assert len(used) > 5
    assert {key for key in used - _NO_KEY if key not in told} == set()


def test_every_label_of_a_node_is_told() -> None:
    snapshot = snapshot_of(1)
    snapshot = replace(snapshot, gpus=(replace(snapshot.gpus[0], model="NVIDIA H100 80GB HBM3"),))
    told = {key for key, _ in kubernetes.LABELS}
    made = gpu_labels(snapshot, describe=True)
    assert told <= made.keys()
    parts_of_versions = {key for key in made.keys() - told if re.search(r"-version\.(major|minor|revision)$", key)}
    assert made.keys() - told == parts_of_versions


def test_a_file_of_settings_is_read_with_its_comments() -> None:
    text = "# of the file\nhttp:\n  # One line\n  # and another.\n  port: 1\n  socket: /x\n"
    assert entries(text) == {"http.port": ("1", "One line and another."), "http.socket": ("/x", "")}


def test_a_part_is_put_between_its_marks_and_nowhere_else() -> None:
    begin, end = marks("x")
    assert fill(f"a\n{begin}\nold\n{end}\nb", {"x": "new"}) == f"a\n{begin}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match="marks"):
        fill("a", {"x": "new"})


def test_cells_stay_in_their_columns() -> None:
    assert table(("a", "b"), [("x|y", "one\ntwo")]) == "| a | b |\n|---|---|\n| x\\|y | one two |"
