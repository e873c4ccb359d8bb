"""The first moments of `gpumgr run`, and how the process ends."""

import asyncio
import signal
import subprocess
import sys
import threading
from typing import Final

import pytest
from structlog.testing import capture_logs

from gpumgr.cli import run
from gpumgr.common.errors import CheckpointError

#: The console script as installed.
_SCRIPT: Final = "import gpumgr.__main__; gpumgr.__main__.main()"
_MODULE: Final = 'import runpy; runpy.run_module("gpumgr", run_name="__main__", alter_sys=True)'
#: A SIGHUP comes before each module that is neither of the standard library nor where the command begins. Its arguments
#: end the agent when all is imported; then it prints the number of signals.
_HUNG_UP: Final = """
import os, signal, sys

class HangUp:
    times = 0

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names and name not in ("gpumgr", "gpumgr.__main__"):
            HangUp.times += 1
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, HangUp())
sys.argv = ["gpumgr", "run", "--standalone", "--set", "nonsense"]
try:
    BEGIN
finally:
    imported = {"click", "gpumgr.node.lifecycle", "aiohttp"} <= set(sys.modules)
    print("hung up early and often:", imported and HangUp.times > 100)
"""


@pytest.mark.parametrize("begin", [_SCRIPT, _MODULE], ids=["script", "module"])
def test_a_sighup_that_comes_before_anybody_listens_ends_nothing(begin: str) -> None:
    command = [sys.executable, "-c", _HUNG_UP.replace("BEGIN", begin)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "hung up early and often: True\n",
        "gpumgr: --set 'nonsense': expected SECTION.KEY=VALUE, for example http.port=9000\n",
    )


def test_a_second_signal_ends_a_daemon_at_once() -> None:
    code = """
import asyncio, os, signal
from gpumgr.cli.daemon import run_until_signalled

async def run(stop):
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

run_until_signalled(run)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (128 + signal.SIGTERM, "stopping")


def test_the_reason_of_the_end_is_logged_although_a_thread_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop ends only after its threads, for example one that reads a file of a dead server."""
    logged, known = threading.Event(), list[bool]()

    async def fails(*_: object, **__: object) -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: known.append(logged.wait(10)))
        raise CheckpointError("the disk is gone")

    def exit_code(error: BaseException) -> int:
        code = original(error)
        logged.set()
        return code

    original = run._exit_code
    monkeypatch.setattr(run, "run", fails)
    monkeypatch.setattr(run, "_exit_code", exit_code)
    monkeypatch.setattr(run, "configure_log", lambda *_: None)
    with capture_logs() as logs, pytest.raises(SystemExit) as ended:
        run.command.main(["--standalone"], standalone_mode=False)
    assert (ended.value.code, known) == (run.EXIT_CHECKPOINT, [True])
    assert [(each["event"], each["reason"]) for each in logs] == [("ended", "the disk is gone")]
