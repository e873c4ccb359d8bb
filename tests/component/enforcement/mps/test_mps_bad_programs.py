"""Control programs that do not answer, or not as they should, and daemons of other programs."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.common.errors import MpsTransientError, Refusal
from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.control import ControlProgram
from tests.background import until
from tests.component.enforcement.mps.place import UUID, Place, program, running, tenant


def control_program(folder: Path, text: str, *, timeout_seconds: float) -> ControlProgram:
    return ControlProgram(program(folder / "nvidia-cuda-mps-control", text), timeout_seconds=timeout_seconds)


async def pid_in(path: Path) -> int:
    def read() -> str:
        return path.read_text() if path.exists() else ""

    await until(lambda: read().endswith("\n"))
    return int(read())


@pytest.mark.parametrize("does", ["exec sleep 600", "sleep 600", "exec >&- 2>&-; exec sleep 600"])
async def test_a_program_that_does_not_end_is_killed_at_the_time_limit(tmp_path: Path, does: str) -> None:
    control = control_program(tmp_path, f"echo $$ > {tmp_path}/pid; {does}", timeout_seconds=0.5)
    with pytest.raises(MpsTransientError, match=r"did not end `get_server_list` within 0\.5 s"):
        await control.communicate([str(control.program)], {}, "get_server_list\n")
    assert start_time_ticks(await pid_in(tmp_path / "pid")) is None


async def test_a_process_in_the_background_that_keeps_the_output_open_does_not_block(tmp_path: Path) -> None:
    left = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' &"
    control = control_program(tmp_path, left, timeout_seconds=60)
    assert await control.communicate([str(control.program)], {}, "") == (0, "")
    os.kill(await pid_in(tmp_path / "pid"), signal.SIGKILL)


async def test_of_a_long_output_the_beginning_is_kept(tmp_path: Path) -> None:
    """A container can replace the daemon's socket, and send the control program more than the agent has memory for."""
    control = control_program(tmp_path, "head -c 5000000 /dev/zero 2>&-", timeout_seconds=60)
    status, output = await control.communicate([str(control.program)], {}, "")
    assert (status, len(output)) == (1, 1 << 20)


async def test_a_program_that_prints_to_stderr_only_is_read(place: Place) -> None:
    place.program.write_text(place.program.read_text().replace("exec", "exec 1>&2; exec"))
    backend = await place.started(protocol="2")
    await place.pass_time(backend)
    assert backend.daemons()[0].trouble is None


BROKEN = "libcuda.so.1: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        (f"echo 'error while loading shared libraries: {BROKEN}' >&2; exit 127", BROKEN),
        ("printf a1,gpu,Bu", "answered 'a1,gpu,Bu', not lines of"),
        ("echo 'unrecognized option -p' >&2; exit 1", "unrecognized option -p"),
    ],
)
async def test_a_program_that_is_replaced_while_daemons_run_is_reported_and_the_daemon_stays(
    place: Place, instead: str, said: str
) -> None:
    backend = await place.started()
    await place.pass_time(backend)
    pid = place.daemon_pid()
    working = place.program.read_text()
    program(place.program, instead)
    for seconds in (1.0, 5.0):
        await place.pass_time(backend, seconds)
        found = await backend.observe([running(tenant(), os.getpid())])
        assert [(finding.code, said in finding.message) for finding in found] == [("broken", True)]
    assert place.daemon_pid() == pid
    program(place.program, working.partition("\n")[2])
    await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert (daemon.trouble, daemon.pid) == (None, pid)


async def test_an_older_program_while_containers_use_protocol_3_asks_to_drain_the_node(place: Place) -> None:
    backend = await place.started()
    place.behave(protocols=[2])
    assert "does not support MPS protocol 3" in str(await backend.unavailable())
    assert backend.daemons()[0].config.protocol == 3


# -- a daemon of another program ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def other_daemon(pipe: str, **environment: str) -> AsyncIterator[int]:
    """A process that looks like one."""
    path = {"PATH": os.environ["PATH"], "CUDA_MPS_PIPE_DIRECTORY": pipe, **environment}
    script = "exec -a nvidia-cuda-mps-control bash -c 'echo; read' -d"
    pipe_end = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("bash", "-c", script, env=path, stdin=pipe_end, stdout=pipe_end)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def test_a_gpu_with_a_daemon_of_another_program_is_refused_until_it_has_ended(place: Place) -> None:
    backend = await place.agent()
    async with other_daemon("/tmp/elsewhere", CUDA_VISIBLE_DEVICES=UUID) as pid:
        with pytest.raises(
            Refusal, match=rf"another program has started an MPS daemon for GPU {UUID} \(process {pid}, pipe folder"
        ):
            await backend.start(tenant())
        assert (place.daemon_pid(), place.modes.now) == (None, {UUID: 0})
    await backend.start(tenant())
    assert place.daemon_pid() is not None


@pytest.mark.parametrize("visible", ["GPU-ffffffff-0000-0000-0000-000000000001", "0"])
async def test_a_daemon_that_is_not_certainly_of_this_gpu_does_not_matter(place: Place, visible: str) -> None:
    backend = await place.agent()
    async with other_daemon("/tmp/elsewhere", CUDA_VISIBLE_DEVICES=visible):
        await backend.start(tenant())
        assert processes.daemon_of_others(UUID) is None
