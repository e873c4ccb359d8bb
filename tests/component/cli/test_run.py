"""`gpumgr run`: how the process ends."""

import asyncio
import threading

import pytest
from structlog.testing import capture_logs

from gpumgr.cli import run
from gpumgr.common.errors import CheckpointError


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
