"""The demo as a user calls it."""

import asyncio
import errno
import json
import os
import pty
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from io import FileIO
from pathlib import Path

import pytest

from .stage import children, gpumgr

#: The command without the pauses between its steps, which are for a reader.
_NO_PAUSE = """
from gpumgr.sim.demo import runner
vars(runner)["_PAUSE_SECONDS"] = 0
from gpumgr.cli import main
main()
"""


async def test_on_a_terminal_the_demo_continues_after_the_script_until_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    size = {**os.environ, "COLUMNS": "160", "LINES": "50"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _NO_PAUSE, "demo", stdin=theirs, stdout=theirs, env=size)
    os.close(theirs)
    told = bytearray()
    with FileIO(ours) as terminal:
        try:
            async with asyncio.timeout(90):
                while b"demo/guest-0" not in told:
                    told += (some := await _some(terminal))
                    assert some, f"it ended:\n{told.decode()}"
                asked = re.search(rb"in another terminal: .* usage --watch --config (/tmp/gm\w+/gpumgr\.yaml)", told)
                assert asked, told.decode()
                options = ["--config", asked[1].decode(), "--output", "json"]
                _, out, _ = await gpumgr("usage", *options)
                assert len(json.loads(out)["gpus"]) == 8
                process.send_signal(signal.SIGINT)
                while some := await _some(terminal):
                    told += some
                assert await process.wait() == 0, told.decode()
        finally:
            if process.returncode is None:
                process.kill()  # so that the read of its terminal ends, too
    assert b"FAIL" not in told
    assert told.count(b"ok    ") >= 16
    assert b"ok    usage is reported" in told
    assert b"ok    the agent stops" in told


async def _some(terminal: FileIO) -> bytes:
    """What a process wrote to its terminal; nothing once it has ended."""
    try:
        return await asyncio.to_thread(terminal.read, 65536) or b""
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise


async def _begun(folder: Path) -> tuple[Process, int]:
    """A demo that has done a step, and the pid of its agent. Their files are in `folder`."""
    command = (sys.executable, "-m", "gpumgr", "demo")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env={**os.environ, "TMPDIR": str(folder)})
    assert process.stdout is not None
    async with asyncio.timeout(90):
        told = [b""]
        while not told[-1].startswith(b"ok "):
            told.append(await process.stdout.readline())
            assert told[-1], b"".join(told).decode()
    assert re.search(rb"web_listening .*url=http://127\.0\.0\.1:[0-9]+", b"".join(told))
    ((child, words),) = children(process.pid).items()
    (used,) = {Path(word).parent for word in words if word.endswith("gpumgr.yaml")}
    assert used.parent == folder
    return process, child


async def test_a_demo_that_is_interrupted_leaves_nothing_behind(folder: Path) -> None:
    process, child = await _begun(folder)
    process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(90):
        out, _ = await process.communicate()
    assert b"not reached" in out
    assert process.returncode == 1
    assert os.listdir(folder) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


async def test_a_demo_that_is_killed_takes_its_agent_along(folder: Path) -> None:
    process, child = await _begun(folder)
    process.kill()
    await process.wait()
    async with asyncio.timeout(90):
        while _runs(child):  # noqa: ASYNC110 (another process ends)
            await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process has not ended; its end may not have been read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
