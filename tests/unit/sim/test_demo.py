"""The demo: its page ports, what it prints, and how its containers sway: within their grant, differently, the same at every showing."""

import socket
import sys
from pathlib import Path

import pytest

from gpumgr.sim.demo.runner import log_text, own_command, reserved_page_port
from gpumgr.sim.demo.workload import use_at


def test_two_demos_reserve_different_ports_before_their_agents_listen() -> None:
    with reserved_page_port() as first:
        with reserved_page_port() as second:
            assert 0 < first < second
        with reserved_page_port() as again:
            assert again == second


def test_a_reserved_port_is_left_to_the_agent() -> None:
    with reserved_page_port() as port, socket.create_server(("127.0.0.1", port)), reserved_page_port() as other:
        assert other not in (0, port)


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


GRANT_BYTES = 5 << 30
NAMES = [f"pod-{number}" for number in range(50)]


def series(name: str) -> list[tuple[int, int]]:
    return [use_at(name, tick, memory_bytes=GRANT_BYTES, cores=40) for tick in range(120)]


def test_no_container_exceeds_its_grant() -> None:
    for name in NAMES:
        for memory_bytes, percent in series(name):
            assert 0 < memory_bytes <= GRANT_BYTES
            assert 1 <= percent <= 40


def test_the_use_of_every_container_changes_in_its_own_way_from_the_load_of_its_model_on() -> None:
    for name in NAMES:
        memory, percents = zip(*series(name), strict=True)
        assert memory[0] < memory[1] < memory[2] < memory[3]
        assert max(memory) - min(memory[4:]) > GRANT_BYTES // 20
        assert len(set(percents)) > 5
    assert len({tuple(series(name)) for name in NAMES}) == len(NAMES)
