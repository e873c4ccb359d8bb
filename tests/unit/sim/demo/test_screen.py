"""The demo's picture and its sentences."""

import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpumgr.sim.demo.node import Metrics
from gpumgr.sim.demo.runner import Result
from gpumgr.sim.demo.screen import LiveScreen, LogSentences, gpu_table, own_command

UUID = "GPU-0fe1c342-debb-5510-9ecf-1889a30463b1"
GPU: dict[str, Any] = {
    "uuid": UUID,
    "name": "0fe1c342",
    "index": 0,
    "takes_nothing_new": None,
    "cores_free": 60,
    "memory_blocks": 160,
    "memory_blocks_free": 80,
    "holders": [{"pod": "a", "container": "main", "init": False, "cores": 40}],
}


def drawn(metrics: Metrics) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(gpu_table([GPU], metrics))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def told(used_bytes: float, ratio: float) -> Metrics:
    labels = frozenset({("gpu", UUID)})
    return {("gpumgr_gpu_memory_used_bytes", labels): used_bytes, ("gpumgr_gpu_utilization_ratio", labels): ratio}


def test_what_is_used_of_what_was_granted() -> None:
    text = drawn(told(10 << 30, 0.25))
    assert "██▒·····  25/40" in text
    assert "██▒▒····  10/20" in text
    assert "a 40" in text


def test_more_than_was_granted_and_more_than_there_is() -> None:
    text = drawn(told(60 << 30, 1.0))
    assert "████████ 100/40" in text
    assert "████████  60/20" in text


def test_an_agent_before_its_first_sample() -> None:
    assert "▒▒▒·····   0/40" in drawn({})


def shown(picture: LiveScreen, console: Console) -> list[str]:
    assert isinstance(console.file, StringIO)
    console.print(picture.picture())
    return console.file.getvalue().rstrip("\n").splitlines()


@pytest.mark.parametrize("height", [17, 24, 50])
def test_the_picture_has_the_newest_decisions_and_steps_and_how_to_ask_and_end(
    height: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/gpumgr", "demo"])
    console = Console(file=StringIO(), width=80, height=height)
    picture = LiveScreen(console, stays=True)
    picture.set_node(Path("/tmp/gmabcdefgh/gpumgr.yaml"), {})
    picture.on_log_line({"event": "web_listening", "url": "http://127.0.0.1:5678"})
    picture.set_state([{**GPU, "index": index} for index in range(8)], {})
    for number in range(9):
        picture.on_log_line({"event": "gpu_process_unattributed_gone", "pid": number})
        picture.step_ended(Result(name=f"step {number}", ok=True, detail="it came out"))
    picture.step_begins("a GPU fails")
    lines = shown(picture, console)
    assert len(lines) == height
    assert lines[0].startswith(" the page: http://127.0.0.1:5678/")
    assert lines[1].rstrip() == " ask it: .venv/bin/gpumgr usage --config /tmp/gmabcdefgh/gpumgr.yaml"
    last = [line.rstrip() for line in lines[-2:]]
    assert last == ["...  a GPU fails", "metrics: http://127.0.0.1:5678/metrics   Ctrl-C ends the demo"]
    text = "\n".join(lines)
    assert ("process 8 has left the GPUs" in text, "step 8" in text) == (height > 17, height > 17)
    assert ("process 0 has left the GPUs" in text, "step 4" in text) == (height > 24, height > 24)


def test_a_long_command_is_not_cut() -> None:
    console = Console(file=StringIO(), width=80, height=24)
    picture = LiveScreen(console, stays=True)
    picture.set_node(Path(f"/tmp/{'x' * 60}/gpumgr.yaml"), {})
    assert f"/tmp/{'x' * 60}/gpumgr.yaml" in "".join(line.strip() for line in shown(picture, console))


def test_an_agent_that_is_down_is_reported() -> None:
    console = Console(file=StringIO(), width=80, height=24)
    picture = LiveScreen(console, stays=False)
    picture.set_state(None, {})
    lines = shown(picture, console)
    assert any("the agent does not answer" in line for line in lines)
    assert not any("Ctrl-C" in line for line in lines)


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
