"""The program that measures limits on a GPU, where it ends before it measures anything."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hardware.__main__ import main, measured, options_of
from tests.hardware.node import TenantProcesses


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mig",), "'mig' is none of none, mps, hami-core, nvml-memory"),
        (("--hami-core", "/nonexistent/libvgpu.so"), "/nonexistent/libvgpu.so is no file"),
        (("--seconds", "0"), "must be at least 1"),
        (("--environ", "NAME"), "'NAME' is not NAME=VALUE"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


async def test_a_mechanism_whose_agent_does_not_start_has_the_reason_and_does_not_end_the_others(tmp_path: Path) -> None:
    result = await measured("none", options_of(["--sim", str(tmp_path / "none.yaml")]), rate=1.0)
    assert result.mechanism == "none"
    assert "none.yaml" in (result.obstacle or "")


def test_a_tenant_that_ended_is_an_obstacle_with_its_status(tmp_path: Path) -> None:
    tenants = TenantProcesses(tmp_path)
    pid = tenants.start()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="a tenant ended with status -9 at 'init'"):
        asyncio.run(tenants.ask(pid, "init"))
    tenants.close()
