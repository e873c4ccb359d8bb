"""The agent as a process of its own: started, listened to, stopped, killed."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, TypeVar

from gpumgr.demo.journal import Journal
from gpumgr.errors import GpumgrError

T = TypeVar("T")

#: `python -m gpumgr`, with this very interpreter.
COMMAND: Final = (sys.executable, "-m", "gpumgr")
_LONGEST_LINE_BYTES: Final = 1 << 20
#: What a process that does not end after SIGTERM gets before SIGKILL.
_PATIENCE_SECONDS: Final = 20.0


class AgentEndedError(GpumgrError):
    """The agent's process ended where it should run."""


class AgentProcess:
    """One agent that may be started many times. `journal` has the log of all its lives.

    It leads a process group of its own, so that Ctrl-C on the terminal reaches us alone.
    """

    def __init__(self, arguments: Sequence[str], journal: Journal, *, command: Sequence[str] = COMMAND) -> None:
        self.journal = journal
        self._arguments = [*command, *arguments]
        self._process: Process | None = None
        self._reader: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self._process
        return process.pid if process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Spawns it, with `environ` over ours less what is meant for another agent."""
        meant = {key: text for key, text in os.environ.items() if not _for_an_agent(key)}
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env={**meant, **(environ or {})},
            limit=_LONGEST_LINE_BYTES,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process), name="agent_log")

    async def while_running(self, work: Awaitable[T]) -> T:
        """What `work` returns. Raises AgentEndedError with the end of the log if the agent ends before."""
        assert self._reader is not None, "the agent was started"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._reader], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AgentEndedError(f"the agent ended with status {await self.ended()}:\n{self.journal.tail()}")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def ended(self) -> int:
        """The exit status (negative: the signal's number), once it has ended and its log is read."""
        assert self._reader is not None, "the agent was started"
        return await asyncio.shield(self._reader)

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await self.ended()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """SIGKILL; the exit status."""
        self.signal(signal.SIGKILL)
        return await self.ended()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.running and self._process.returncode is None:
            self._process.send_signal(number)

    async def close(self) -> None:
        """Ends it if it still runs."""
        if self._reader is not None:
            await self.kill()

    async def _read(self, process: Process) -> int:
        assert process.stderr is not None, "it is a pipe"
        async for raw in process.stderr:
            self.journal.add(raw)
        return await process.wait()


def _for_an_agent(variable: str) -> bool:
    return variable.startswith("GPUMGR_") or variable in ("NODE_NAME", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
