"""The demo's picture and its sentences."""

from io import StringIO
from typing import Any

from rich.console import Console

from gpumgr.demo.node import Metrics
from gpumgr.demo.screen import gpu_table
from gpumgr.demo.telling import Teller

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


def test_an_agent_that_has_not_looked_yet() -> None:
    assert "▒▒▒·····   0/40" in drawn({})


def test_sentences_about_use() -> None:
    teller = Teller({"0fe1c342": "GPU0"})
    over = {
        "event": "container_over_limit",
        "level": "warning",
        "holder": "demo/a (main)",
        "gpu": "0fe1c342",
        "memory_bytes": 3 << 30,
        "memory_limit_bytes": 2 << 30,
    }
    assert teller.sentence(over) == "over its limit: demo/a (main) uses 3.0 GiB on GPU0 and was granted 2.0"
    assert teller.sentence({"event": "gpu_stranger", "pid": 7, "gpus": ["0fe1c342"]}) == (
        "process 7 uses GPU0 and belongs to nobody"
    )
    assert teller.sentence({"event": "web_listening", "url": "http://127.0.0.1:5678"}) == (
        "the page is at http://127.0.0.1:5678/"
    )
    assert teller.sentence({"event": "enforcement", "level": "warning", "because": "it is so"}) == "enforcement: it is so"
