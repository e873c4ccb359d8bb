"""Runs the agent as a separate process: starts it, reads its log, stops or kills it."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from gpumgr.common.aio import LatestValue, run_until
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import decode_json

Line = dict[str, Any]

_TAIL = 12


class AgentLog:
    """All log lines of an agent so far. `on_line` gets each new one."""

    def __init__(self, on_line: Callable[[Line], None] = lambda _line: None) -> None:
        self.lines: list[Line] = []
        self._on_line = on_line
        self._count = LatestValue(0)

    def add(self, raw: bytes) -> None:
        """Stores a line. Text that is not a JSON object, such as a traceback, becomes an event named "text"."""
        text = raw.decode(errors="replace").rstrip("\n")
        try:
            line = decode_json(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            line = {"event": "text", "text": text}
        self.lines.append(line)
        self._on_line(line)
        self._count.set(len(self.lines))

    def find(self, event: str, **fields: object) -> list[Line]:
        wanted = {"event": event, **fields}
        return [line for line in self.lines if wanted.items() <= line.items()]

    async def until(self, event: str, *, since: int = 0, **fields: object) -> Line:
        """Returns the first line with this event and these fields, or waits for it. `since`: the number of lines to skip."""
        return await self.until_match(lambda line: {"event": event, **fields}.items() <= line.items(), since=since)

    async def until_match(self, matches: Callable[[Line], bool], *, since: int = 0) -> Line:
        """Like `until`, for a line for which `matches` is true."""
        with self._count.subscribe() as counts:
            async for _ in counts:
                for line in self.lines[since:]:
                    if matches(line):
                        return line
                since = len(self.lines)
        raise AssertionError("no other task closes this subscription")

    def tail(self) -> str:
        return "\n".join(json.dumps(line) if line["event"] != "text" else line["text"] for line in self.lines[-_TAIL:])


T = TypeVar("T")

#: `python -m gpumgr`, with this interpreter.
COMMAND: Final = (sys.executable, "-m", "gpumgr")
_LONGEST_LINE_BYTES: Final = 1 << 20
#: Loaded before a fork, because a forked child of a process with threads can't load a library safely.
_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1
_PATIENCE_SECONDS: Final = 20.0


class AgentEndedError(GpumgrError):
    """The agent's process ended unexpectedly."""


class AgentProcess:
    """One agent, which may be started several times; `agent_log` has the lines of all starts.

    It leads a process group of its own, so Ctrl-C on the terminal does not signal it.
    """

    def __init__(self, arguments: Sequence[str], agent_log: AgentLog, *, command: Sequence[str] = COMMAND) -> None:
        self.agent_log = agent_log
        self._arguments = [*command, *arguments]
        self._process: Process | None = None
        self._reader: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """None while the process does not run."""
        process = self._process
        return process.pid if process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def start(self, environ: Mapping[str, str] | None = None) -> None:
        inherited = {key: text for key, text in os.environ.items() if not _for_an_agent(key)}
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env={**inherited, **(environ or {})},
            limit=_LONGEST_LINE_BYTES,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._reader = asyncio.create_task(self._read(self._process), name="agent_log")

    async def while_running(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`. Raises AgentEndedError, with the end of the log, if the agent ends first."""
        assert self._reader is not None, "the agent was started"
        done = await run_until(self.ended(), work)
        if done.cancelled():
            raise AgentEndedError(f"the agent ended with status {await self.ended()}:\n{self.agent_log.tail()}")
        return done.result()

    async def ended(self) -> int:
        """Returns the exit status (negative: the signal's number) when the process has ended and its log is read."""
        assert self._reader is not None, "the agent was started"
        return await asyncio.shield(self._reader)

    async def stop(self) -> int:
        """Sends SIGTERM (and SIGKILL if that has no effect); returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await self.ended()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return await self.ended()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.running and self._process.returncode is None:
            self._process.send_signal(number)

    async def close(self) -> None:
        if self._reader is not None:
            await self.kill()

    async def _read(self, process: Process) -> int:
        assert process.stderr is not None, "it is a pipe"
        async for raw in process.stderr:
            self.agent_log.add(raw)
        return await process.wait()


def _end_with_parent() -> None:
    """Lets the kernel kill the agent when the thread that started it ends, so no agent is left alone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _for_an_agent(variable: str) -> bool:
    return variable.startswith("GPUMGR_") or variable in ("NODE_NAME", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
