import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpumgr.cli

from .fake_agent import FakeAgent
from .process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The exit code of a command, and its output."""

    code: int
    out: str
    err: str

    def failed(self, code: int, *words: str) -> None:
        """Checks that the command printed only an error with these words."""
        assert (self.code, self.out) == (code, "")
        for each in words:
            assert each in self.err


Gpumgr = Callable[..., Awaitable[Ended]]
Start = Callable[..., Awaitable[Process]]


@pytest.fixture
def socket(folder: Path) -> Path:
    return folder / "agent.sock"


@pytest.fixture
async def agent(socket: Path) -> AsyncIterator[FakeAgent]:
    agent = FakeAgent(socket)
    await agent.start()
    yield agent
    await agent.stop()


@pytest.fixture
def _no_settings_of_this_host(folder: Path, socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPUMGR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("gpumgr.cli.options.DEFAULT_CONFIG", folder / "gpumgr.yaml")
    monkeypatch.setenv("GPUMGR_CHECKPOINT_DIR", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("GPUMGR_HTTP_SOCKET", str(socket))


@pytest.fixture
def gpumgr_command(
    _no_settings_of_this_host: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gpumgr:
    """Runs `gpumgr ARGUMENTS` to its end in a thread of this process, with the program's own exit codes."""

    def main() -> int:
        try:
            gpumgr.cli.main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else -1
        return 0

    async def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["gpumgr", *map(str, arguments)])
        code = await asyncio.to_thread(main)
        out, err = capsys.readouterr()
        return Ended(code=code, out=out, err=err)

    return run


@pytest.fixture
async def start(_no_settings_of_this_host: None) -> AsyncIterator[Start]:
    """Starts `gpumgr ARGUMENTS` as a process of its own on a terminal; what still runs at the end is killed."""
    async with contextlib.AsyncExitStack() as ends:

        async def begin(*arguments: str | Path) -> Process:
            return await ends.enter_async_context(Process(*map(str, arguments)))

        yield begin
