"""Finds NVIDIA's MPS control program, and runs it with a time limit.

An agent in a pod starts the daemons on the host (see launcher). So the pod must be able to enter the host's mount namespace, and later
mounts of the host must propagate into the pod.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gpumgr.common.errors import MpsError, MpsTimeoutError, MpsTransientError
from gpumgr.common.proc import mount_of, start_time_ticks
from gpumgr.enforcement.mps.commands import (
    Command,
    ControlFeatures,
    MpsProtocol,
    environment,
    is_help,
    list_servers,
    parse_help,
    refusal_in,
)
from gpumgr.enforcement.mps.compute_mode import ComputeModes
from gpumgr.enforcement.mps.folders import GpuFolder
from gpumgr.enforcement.mps.launcher import LaunchMethod, host_prefix

#: The program prints this if it finds no daemon, and does not always set its exit status.
_NO_DAEMON: Final = "Cannot find MPS control daemon"
#: Exit status of the loader (a library is missing) and of wrappers (the program is missing or can't be executed).
_NOT_RUN: Final = (126, 127)
#: The limit of a program's output: a container that answers in the daemon's place could send without end.
_MAX_BYTES: Final = 1 << 20
#: Threads of their own, not asyncio's: for each GPU, a program that hangs can block a thread until the time limit.
_THREADS: Final = ThreadPoolExecutor(32, "mps-control")
_INSTALL: Final = "install NVIDIA's driver completely, or set mps.control_program to its program"


class ControlProgram:
    """`program`: a path, or a name to search in PATH. `before`: a prefix that runs commands on the host (nsenter).

    Calls may run concurrently.
    """

    def __init__(self, program: Path, *, timeout_seconds: float, before: Sequence[str] = ()) -> None:
        self.program, self._before = program, before
        self._timeout_seconds = timeout_seconds

    async def features(self) -> ControlFeatures:
        """Raises MpsError if the program does not work or is another one, MpsTransientError if a later call may succeed."""
        # No daemon uses this pipe folder. In another folder an old program would connect to the daemon.
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
        """Raises MpsError."""
        status, output = await self.communicate([str(self.program), *command.words], environment, command.text)
        if status or _NO_DAEMON in output or refusal_in(command, output):
            where = environment.get("CUDA_MPS_LOG_DIRECTORY", "")
            raise MpsError(
                f"`{command}` to {self.program.name} failed with status {status}: {shown(output)}; see {where}/control.log"
            )
        return output

    async def run(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        """Runs a program that leaves a process in the background, which may keep the file of the output open. Raises MpsError."""
        with output.open("wb") as file:
            status, _ = await self._execute(argv, environment, "", file.fileno())
        if status:
            output_text = shown(await asyncio.to_thread(output.read_text, errors="replace"))
            raise MpsError(f"{' '.join(argv)!r} ended with status {status}: {output_text}; see {output.parent}")

    async def communicate(self, argv: Sequence[str], environment: Mapping[str, str], text: str) -> tuple[int, str]:
        """Runs a command, on the host if `before` is set. Returns the exit status, and stdout with stderr. Raises MpsTransientError."""
        return await self._execute([*self._before, *argv], environment, text, None)

    async def _execute(
        self, argv: Sequence[str], environment: Mapping[str, str], text: str, output: int | None
    ) -> tuple[int, str]:
        # On a thread, since asyncio's subprocesses take 1.5 times as long.
        limited = partial(_run, argv, environment, text, output, self._timeout_seconds)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, limited)


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all daemons of the node have in common. `exclusive`: shared GPUs are in EXCLUSIVE_PROCESS mode. `clock`: in seconds. `client`: a
    CUDA program that makes a context and ends; on an H200 a context takes less than a second."""

    protocol: MpsProtocol
    multiuser_option: str
    control: ControlProgram
    launcher: LaunchMethod
    modes: ComputeModes
    exclusive: bool
    clock: Callable[[], float]
    client: Sequence[str]
    client_seconds: float = 15.0


class DaemonClient(msgspec.Struct, frozen=True):
    """Sends commands to a GPU's daemon."""

    config: DaemonConfig
    uuid: str
    folder: GpuFolder

    @property
    def environment(self) -> Mapping[str, str]:
        return environment(self.config.protocol, self.uuid, self.folder.pipe, self.folder.log)

    async def run(self, *each: Command) -> str:
        """The last command's output. Raises MpsError."""
        answers = [await self.config.control.query(command, self.environment) for command in each]
        return answers[-1]

    async def run_for_server(self, pid: int, *each: Command) -> str | None:
        """Like `run`; None if the server has ended since it was listed, perhaps because another user's clients wait. Raises MpsError."""
        try:
            return await self.run(*each)
        except MpsError:
            if start_time_ticks(pid) is None:
                return None
            raise


def _run(
    argv: Sequence[str], environment: Mapping[str, str], text: str, output: int | None, limit_seconds: float
) -> tuple[int, str]:
    """Exit status and output, which is empty if `output` is the caller's file. Raises MpsTransientError.

    The program gets none of the agent's CUDA_ variables, and a session of its own, which no signal to the agent's session reaches. After
    the time limit the session's processes are killed, except a daemon that has left it.
    """
    given = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")} | {**environment}
    with open(os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb") as printed:
        os.ftruncate(printed.fileno(), _MAX_BYTES)
        fcntl.fcntl(printed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        to = printed if output is None else output
        try:
            process = subprocess.Popen(
                argv, env=given, stdin=subprocess.PIPE, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise MpsTransientError(
                f"can't run {argv[0]}: {error.strerror or error}; is NVIDIA's driver installed completely?"
            ) from error
        late = threading.Event()

        def kill() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_seconds, kill)
        timer.start()
        with process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(text.encode())
            # WNOWAIT does not reap the process, so no other process can get its id while the timer may kill it. Popen's wait with a time
            # limit would poll.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            timer.cancel()
            timer.join()
        if late.is_set():
            command = text.strip() or " ".join(argv[1:])
            raise MpsTimeoutError(
                f"{argv[0]} did not end `{command}` within {limit_seconds:g} s; "
                "check whether the driver answers (nvidia-smi) and what the kernel's log says"
            )
        end = os.lseek(printed.fileno(), 0, os.SEEK_CUR)  # the program shares the file's position
        return process.returncode, os.pread(printed.fileno(), end, 0).decode(errors="replace")


def shown(output: str) -> str:
    return repr(" ".join(output.split())[:200]) if output.strip() else "no output"


_COMES_WITH: Final = "it comes with the driver (package nvidia-compute-utils); set mps.control_program"
#: A script for the host; $0 is the control program's name. Each line of the output is a fact: its name and its value.
_PROBE: Final = """
test -d /run/systemd/system && echo systemd-run "$(command -v systemd-run)"
echo program "$(command -v "$0")"
"""


async def find_control_program(name: str, method: LaunchMethod, run_dir: Path, *, timeout_seconds: float) -> ControlProgram:
    """Finds the program, on the host for an agent in a pod. `run_dir`: the daemons' folder. Raises MpsError, MpsTransientError."""
    if method != "host":
        path = await asyncio.to_thread(shutil.which, name)
        if path is None:
            raise MpsError(f"NVIDIA's MPS control program {name!r} was not found; {_COMES_WITH}")
        return ControlProgram(Path(path), timeout_seconds=timeout_seconds)
    control = ControlProgram(Path(name), timeout_seconds=timeout_seconds, before=host_prefix(method))
    _, output = await control.communicate(["/bin/sh", "-c", _PROBE, name], {}, "")
    host = {fact: value for fact, _, value in (line.partition(" ") for line in output.splitlines())}
    if not host.get("systemd-run"):
        raise MpsError(
            f"MPS daemons would end with the agent's pod, and the host's systemd, which could prevent this, was not found: "
            f"{shown(output)}; give the pod `privileged: true` and `hostPID: true`, or, on a host without systemd, run the agent on the "
            "host itself"
        )
    if not host.get("program"):
        raise MpsError(f"NVIDIA's MPS control program {name!r} was not found on the host; {_COMES_WITH}")
    if not await asyncio.to_thread(_receives_mounts, run_dir):
        raise MpsError(
            f"shared memory of MPS, which is mounted below {run_dir} on the host, would not be visible in the agent's pod; "
            "set mps.enabled in the chart's values, or `mountPropagation: HostToContainer` for that volume"
        )
    control.program = Path(host["program"])
    return control


def _receives_mounts(folder: Path) -> bool:
    """Whether later mounts of the host below the folder reach the agent. Raises OSError."""
    mount = mount_of(Path("/proc/self/mountinfo").read_text(), folder.resolve())
    return mount is not None and mount.receives
