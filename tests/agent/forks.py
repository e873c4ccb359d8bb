"""Starts agents without their imports, which take most of the time of a start: a server process imports the agent once and forks for each.

A forked agent is a process like any other, with its own session, environment and log; only `python -m` is not part of its start.
`python -m tests.agent.forks SOCKET` is the server. It ends when its standard input is closed.
"""

import asyncio
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

from gpumgr.sim.demo.process import AgentProcess, _for_an_agent

_LONGEST_LINE_BYTES: Final = 1 << 20
#: Python itself reads this variable at its start, so a fork would ignore it.
_NEEDS_A_START: Final = "PYTHONPROFILEIMPORTTIME"


class Forked:
    """The part of asyncio's Process that AgentProcess uses. `answers` are the server's: the process id was read, the status is next."""

    def __init__(
        self, pid: int, stderr: asyncio.StreamReader, answers: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._answers = answers

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        reader, writer = self._answers
        if self.returncode is None:
            self.returncode = int(await reader.readline())
            writer.close()
            await writer.wait_closed()
        return self.returncode


class ForkedAgent(AgentProcess):
    """An AgentProcess that the server at `server` forks."""

    server: Path

    async def start(self, environ: Mapping[str, str] | None = None) -> None:
        if _NEEDS_A_START in (environ or {}):
            await super().start(environ)
            return
        inherited = {key: text for key, text in os.environ.items() if not _for_an_agent(key)}
        process = await _fork(self.server, self._arguments[2:], {**inherited, **(environ or {})})
        self._process = cast(Process, process)
        self._reader = asyncio.create_task(self._read(self._process), name="agent_log")


async def _fork(server: Path, command: list[str], environ: Mapping[str, str]) -> Forked:
    """`command`: a module and its arguments."""
    loop, stderr = asyncio.get_running_loop(), asyncio.StreamReader(limit=_LONGEST_LINE_BYTES)
    ours, theirs = os.pipe()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(ours, "rb"))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(server))
        socket.send_fds(connection, [b"\n"], [theirs])
        connection.sendall(json.dumps([command, os.getcwd(), dict(environ)]).encode())
        connection.shutdown(socket.SHUT_WR)
    finally:
        os.close(theirs)
    connection.setblocking(False)
    answers = await asyncio.open_connection(sock=connection)
    return Forked(int(await answers[0].readline()), stderr, answers)


@contextmanager
def fork_server(folder: Path) -> Iterator[Path]:
    """Starts the server; the path of its socket."""
    path = folder / "forks.sock"
    process = subprocess.Popen([sys.executable, "-m", "tests.agent.forks", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it listens
        yield path
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def serve(path: str) -> tuple[list[str], str, dict[str, str]] | None:
    """Forks for each request until standard input is closed. In the fork, it returns the request with the log as standard error."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    print("listens", flush=True)
    #: pidfd -> the process, and where its status goes.
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    for file in (0, listener.fileno()):
        poll.register(file, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file == 0:
                return None
            if file != listener.fileno():
                pid, client = running.pop(file)
                poll.unregister(file)
                os.close(file)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _answer(client, status)
                client.close()
                continue
            client, _ = listener.accept()
            _, (log,), *_ = socket.recv_fds(client, 1, 1)
            request: Any = json.loads(client.makefile("rb").read())
            pid = os.fork()
            if pid == 0:
                _become_a_session(log, [listener, client, *(each for _, each in running.values())], [*running])
                return request[0], request[1], request[2]
            os.close(log)
            _answer(client, pid)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid, client
            poll.register(descriptor, select.POLLIN)


def _answer(client: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # its test has ended
        client.send(f"{number}\n".encode())


def _become_a_session(log: int, connections: list[socket.socket], descriptors: list[int]) -> None:
    os.setsid()
    for each in connections:
        each.close()
    for descriptor in descriptors:
        os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)


def _import_the_agent() -> None:
    from gpumgr.cli.daemon import lean_imports

    with lean_imports():
        import gpumgr.cli.run  # noqa: F401


if __name__ == "__main__":
    _import_the_agent()
    found = serve(sys.argv[1])
    if found is not None:
        (module, *arguments), folder, environ = found
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
