"""Short benchmarks run through with small options, and measure what their tables show."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from tests.bench.table import markdown

from .places import PROJECT

SMALL: Final[Mapping[str, Sequence[str]]] = {
    "dra": ["--rounds=1"],
    "quotas": [],
    "regions": ["--regions=2"],
    "replica_filter": ["--nodes=300", "--pods=40"],
    "requests": ["--nodes=20", "--pods=40", "--requests=20", "--waiting=20"],
    "usage": ["--rounds=1"],
    "writer": ["--rounds=1"],
}


@pytest.mark.parametrize("name", SMALL)
def test_the_figures_that_the_tables_show_are_measured(name: str) -> None:
    command = [sys.executable, "-m", f"tests.bench.bench_{name}", *SMALL[name]]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = markdown({name: json.loads(done.stdout)})
    assert shown
    assert "?" not in shown
