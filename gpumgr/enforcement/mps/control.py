"""Runs NVIDIA's control program, with a time limit, and turns what it says into text or an MpsError."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpumgr.enforcement.mps.commands import Abilities, Command, is_help, list_servers, parse_help
from gpumgr.enforcement.mps.errors import MpsError, Unanswered

#: Said by the program itself (its exit status is not always set).
_NO_DAEMON: Final = "Cannot find MPS control daemon"
#: Exit status of the loader (a library is missing) and of wrappers: there is no such program, or it may not be run.
_NOT_RUN: Final = (126, 127)
_INSTALL: Final = "install NVIDIA's driver completely, or set mps.control_program to its program"


class Control:
    """`program` is a path, or a name that PATH finds. `before` are the words that lead to where it is, if that is not here.

    Each call is a process of its own: they may run side by side.
    """

    def __init__(self, program: Path, *, timeout_seconds: float, before: Sequence[str] = ()) -> None:
        self.program, self._before = program, before
        self._timeout_seconds = timeout_seconds

    async def abilities(self) -> Abilities:
        """Raises MpsError: also if this is another program, or one that does not work; Unanswered if it may be well later."""
        # A pipe folder without a daemon: an old program that takes no -h begins to talk to one instead.
        nowhere = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/gpumgr"}
        status, plain = await self.converse([str(self.program), "-h"], nowhere, "")
        if status < 0 or status in _NOT_RUN:
            raise MpsError(f"{self.program} does not work, `-h` ended with status {status}: {shown(plain)}; {_INSTALL}")
        newer = await self.converse([str(self.program), "-p", "3", "-h"], {**nowhere, "CUDA_MPS_PROTOCOL_VERSION": "3"}, "")
        if not is_help(f"{plain}\n{newer[1]}"):
            _, said = await self.converse([str(self.program)], nowhere, list_servers(2).text)
            if _NO_DAEMON not in said:
                raise MpsError(f"{self.program} is not NVIDIA's MPS control program: to `-h` it said {shown(plain)}; {_INSTALL}")
        return parse_help(plain, newer[1])

    async def ask(self, command: Command, environment: Mapping[str, str]) -> str:
        """What it prints on standard output. Raises MpsError."""
        status, said = await self.converse([str(self.program), *command.words], environment, command.text)
        if status or _NO_DAEMON in said:
            where = environment.get("CUDA_MPS_LOG_DIRECTORY", "")
            raise MpsError(
                f"`{command}` to {self.program.name} failed with status {status}: {shown(said)}; see {where}/control.log"
            )
        return said

    async def run(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        """For programs that leave a process behind, which may hold their output open: it goes to a file. Raises MpsError."""
        with output.open("wb") as file:
            process = await _spawn(
                argv, environment, stdout=file.fileno(), stderr=file.fileno(), stdin=asyncio.subprocess.DEVNULL
            )
            await self._wait(process, argv)
        if process.returncode:
            said = shown(await asyncio.to_thread(output.read_text, errors="replace"))
            raise MpsError(f"{' '.join(argv)!r} ended with status {process.returncode}: {said}; see {output.parent}")

    async def converse(self, argv: Sequence[str], environment: Mapping[str, str], text: str) -> tuple[int, str]:
        """Runs a command where the program is: exit status, and what it printed on both channels. Raises Unanswered."""
        pipe = asyncio.subprocess.PIPE
        process = await _spawn([*self._before, *argv], environment, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        talk = asyncio.create_task(process.communicate(text.encode()))
        try:
            said, _ = await asyncio.wait_for(talk, self._timeout_seconds)
        except TimeoutError:
            raise self._hung(argv, text) from None
        finally:
            await _end(process)
        return process.returncode or 0, said.decode(errors="replace")

    async def _wait(self, process: asyncio.subprocess.Process, argv: Sequence[str]) -> None:
        try:
            await asyncio.wait_for(process.wait(), self._timeout_seconds)
        except TimeoutError:
            raise self._hung(argv, "") from None
        finally:
            await _end(process)

    def _hung(self, argv: Sequence[str], text: str) -> Unanswered:
        shown = text.strip() or " ".join(argv[1:])
        return Unanswered(
            f"{argv[0]} did not end `{shown}` within {self._timeout_seconds:g} s; "
            "look whether the driver answers (nvidia-smi) and what the kernel's log says"
        )


async def _spawn(
    argv: Sequence[str], environment: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> asyncio.subprocess.Process:
    """In a session of its own, so that no signal to the agent's reaches it; the agent's own CUDA settings are left out."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    try:
        return await asyncio.create_subprocess_exec(
            *argv, env={**inherited, **environment}, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise Unanswered(f"can't run {argv[0]}: {error.strerror or error}; is NVIDIA's driver installed completely?") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """The process and what it started in the foreground. A daemon that has left its session stays."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def shown(said: str) -> str:
    """The beginning of what a program printed, for a sentence."""
    return repr(" ".join(said.split())[:200]) if said.strip() else "it said nothing"
