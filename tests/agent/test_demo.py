"""The demo as a user calls it."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path


async def test_every_step_comes_out_as_scripted() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gpumgr", "demo", "--output", "json", stdout=PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 45)
    document = json.loads(out)
    assert [step for step in document["steps"] if not step["ok"]] == []
    assert (document["ok"], process.returncode) == (True, 0)
    assert len(document["steps"]) >= 15


async def test_a_demo_that_is_interrupted_leaves_nothing_behind() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gpumgr", "demo", stdout=PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(30):
        while not (await process.stdout.readline()).startswith(b"ok "):
            pass
        (child,) = _children(process.pid)
        (folder,) = {Path(word).parent for word in _command(child) if word.endswith("gpumgr.yaml")}
        assert folder.is_dir()
        process.send_signal(signal.SIGTERM)
        out, _ = await process.communicate()
    assert b"not reached" in out
    assert process.returncode == 1
    assert not folder.exists()
    assert not _command(child)


def _children(pid: int) -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _stat(entry)[1:2] == [str(pid)]]


def _stat(pid: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
