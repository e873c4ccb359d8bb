"""Runs NVIDIA's MPS control program with a time limit; its output is returned as text or raised as an MpsError."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.enforcement.mps.commands import Command, ControlFeatures, is_help, list_servers, parse_help, refusal_in
from gpumgr.errors import MpsError, MpsTransientError
from gpumgr.proc import start_time_ticks

#: Printed by the program, the exit status of which is not always set.
_NO_DAEMON: Final = "Cannot find MPS control daemon"
#: Exit status of the loader (a library is missing) and of wrappers: the program is missing or can't be executed.
_NOT_RUN: Final = (126, 127)
_INSTALL: Final = "install NVIDIA's driver completely, or set mps.control_program to its program"


class ControlProgram:
    """`program`: a path, or a name to search in PATH. `before`: a command prefix with which it runs elsewhere (nsenter).

    Each call is a process of its own, so calls may run concurrently.
    """

    def __init__(self, program: Path, *, timeout_seconds: float, before: Sequence[str] = ()) -> None:
        self.program, self._before = program, before
        self._timeout_seconds = timeout_seconds

    async def features(self) -> ControlFeatures:
        """Raises MpsError, also for another program and one that does not work; MpsTransientError if a later call may succeed."""
        # A pipe folder without a daemon: an old program without -h would connect to a daemon instead.
        nowhere = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/gpumgr"}
        status, plain = await self.communicate([str(self.program), "-h"], nowhere, "")
        if status < 0 or status in _NOT_RUN:
            raise MpsError(f"{self.program} does not work, `-h` ended with status {status}: {shown(plain)}; {_INSTALL}")
        newer = await self.communicate([str(self.program), "-p", "3", "-h"], {**nowhere, "CUDA_MPS_PROTOCOL_VERSION": "3"}, "")
        if not is_help(f"{plain}\n{newer[1]}"):
            _, output = await self.communicate([str(self.program)], nowhere, list_servers(2).text)
            if _NO_DAEMON not in output:
                raise MpsError(f"{self.program} is not NVIDIA's MPS control program: `-h` printed {shown(plain)}; {_INSTALL}")
        return parse_help(plain, newer[1])

    async def query(self, command: Command, environment: Mapping[str, str]) -> str:
        """The output of a command. Raises MpsError."""
        status, output = await self.communicate([str(self.program), *command.words], environment, command.text)
        if status or _NO_DAEMON in output or refusal_in(command, output):
            where = environment.get("CUDA_MPS_LOG_DIRECTORY", "")
            raise MpsError(
                f"`{command}` to {self.program.name} failed with status {status}: {shown(output)}; see {where}/control.log"
            )
        return output

    async def run(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        """Runs a program that leaves a process in the background, which may keep the output open: it goes to a file. Raises MpsError."""
        with output.open("wb") as file:
            process = await _spawn(
                argv, environment, stdout=file.fileno(), stderr=file.fileno(), stdin=asyncio.subprocess.DEVNULL
            )
            async with self._limited(process, argv):
                await process.wait()
        if process.returncode:
            output_text = shown(await asyncio.to_thread(output.read_text, errors="replace"))
            raise MpsError(f"{' '.join(argv)!r} ended with status {process.returncode}: {output_text}; see {output.parent}")

    async def communicate(self, argv: Sequence[str], environment: Mapping[str, str], text: str) -> tuple[int, str]:
        """Runs a command where the program is: exit status, and what it printed on both channels. Raises MpsTransientError."""
        pipe = asyncio.subprocess.PIPE
        process = await _spawn([*self._before, *argv], environment, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        async with self._limited(process, argv, text):
            printed, _ = await process.communicate(text.encode())
        return process.returncode or 0, printed.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def _limited(self, process: asyncio.subprocess.Process, argv: Sequence[str], text: str = "") -> AsyncIterator[None]:
        """Ends the process with the block, and the block after the time limit. Raises MpsTransientError."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except TimeoutError:
            command = text.strip() or " ".join(argv[1:])
            raise MpsTransientError(
                f"{argv[0]} did not end `{command}` within {self._timeout_seconds:g} s; "
                "check whether the driver answers (nvidia-smi) and what the kernel's log says"
            ) from None
        finally:
            await _end(process)


@dataclass(frozen=True, slots=True)
class DaemonClient:
    """Runs commands at one GPU's daemon, which `environment` names."""

    control: ControlProgram
    environment: Mapping[str, str]

    async def run(self, *each: Command) -> str:
        """The output of the last command. Raises MpsError."""
        answers = [await self.control.query(command, self.environment) for command in each]
        return answers[-1]

    async def run_for_server(self, pid: int, *each: Command) -> str | None:
        """None: the server has ended since it was listed, which happens for another user's clients. Raises MpsError."""
        try:
            return await self.run(*each)
        except MpsError:
            if start_time_ticks(pid) is None:
                return None
            raise


async def _spawn(
    argv: Sequence[str], environment: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> asyncio.subprocess.Process:
    """In a session of its own, so that no signal to the agent's session reaches it, and without the agent's CUDA_ variables."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    try:
        return await asyncio.create_subprocess_exec(
            *argv, env={**inherited, **environment}, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise MpsTransientError(
            f"can't run {argv[0]}: {error.strerror or error}; is NVIDIA's driver installed completely?"
        ) from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills the process and those of its session. A daemon that has left the session stays."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def shown(output: str) -> str:
    """The beginning of a program's output, for a message."""
    return repr(" ".join(output.split())[:200]) if output.strip() else "no output"
