"""What the demo prints."""

import sys
from pathlib import Path

import pytest

from gpumgr.sim.demo.runner import LogSentences, own_command


def test_the_command_is_named_as_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/gpumgr", "demo"])
    assert own_command() == ".venv/bin/gpumgr"
    monkeypatch.setattr(sys, "argv", ["/x/gpumgr/__main__.py", "demo"])
    assert own_command() == f"{sys.executable} -m gpumgr"
    (tmp_path / "gpumgr").write_text("#!/bin/sh\n")
    (tmp_path / "gpumgr").chmod(0o755)
    assert own_command() == "gpumgr"


def test_sentences_about_use() -> None:
    teller = LogSentences({"0fe1c342": "GPU0"})
    over = {
        "event": "container_over_limit",
        "level": "warning",
        "holder": "demo/a (main)",
        "gpu": "0fe1c342",
        "memory_bytes": 3 << 30,
        "memory_limit_bytes": 2 << 30,
    }
    assert teller.sentence(over) == "over its limit: demo/a (main) uses 3.0 GiB on GPU0 and was granted 2.0"
    assert teller.sentence({"event": "gpu_process_unattributed", "pid": 7, "gpus": ["0fe1c342"]}) == (
        "process 7 uses GPU0 and belongs to no container"
    )
    assert teller.sentence({"event": "web_listening", "url": "http://127.0.0.1:5678"}) == (
        "the page is at http://127.0.0.1:5678/"
    )
    assert teller.sentence({"event": "enforcement", "level": "warning", "because": "it is so"}) == "enforcement: it is so"
