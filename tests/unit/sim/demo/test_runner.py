"""What the demo prints."""

import sys
from pathlib import Path

import pytest

from gpumgr.sim.demo.runner import log_text, own_command


def test_the_command_is_named_as_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/gpumgr", "demo"])
    assert own_command() == ".venv/bin/gpumgr"
    monkeypatch.setattr(sys, "argv", ["/x/gpumgr/__main__.py", "demo"])
    assert own_command() == f"{sys.executable} -m gpumgr"
    (tmp_path / "gpumgr").write_text("#!/bin/sh\n")
    (tmp_path / "gpumgr").chmod(0o755)
    assert own_command() == "gpumgr"


def test_a_log_line_is_shown_with_its_facts() -> None:
    common = {"event": "refused", "level": "info", "timestamp": "t"}
    line = {**common, "pod": "demo/a", "gpus": ["0fe1c342", "1"], "container": None, "reason": "full"}
    assert log_text(line) == "refused pod=demo/a gpus=0fe1c342,1 reason=full"
