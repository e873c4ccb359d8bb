"""What can keep MPS from limiting a container, and what its owner and the operator read then."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import MpsTransientError, Refusal
from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps import control, processes
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.control import ControlProgram
from tests.background import until
from tests.component.enforcement.mps.place import GIB, UUID, Place, program, running, tenant
from tests.shares import TWO_GPUS, gpu_share


async def refusal_of(backend: Mps) -> str:
    with pytest.raises(Refusal) as refusal:
        await backend.start(tenant())
    assert refusal.value.code == "internal"
    return str(refusal.value)


async def test_without_the_program_the_node_cannot_carry_it(place: Place) -> None:
    backend = await place.agent(control_program="/nowhere/nvidia-cuda-mps-control")
    reason = await backend.unavailable()
    assert reason is not None
    assert "'/nowhere/nvidia-cuda-mps-control' was not found" in reason
    assert "mps.control_program" in reason
    with pytest.raises(Refusal, match="not available on this node"):
        backend.prepare(tenant(), "core")
    assert not any((backend.remains(), backend.own_pids({1: 1}), backend.daemons()))
    assert await backend.observe([running(tenant())]) == ()
    await backend.adjust(())
    await backend.recover([tenant()])
    await backend.vacate([UUID])
    await backend.cleanup("a1")
    await backend.close()


LIST = 'exec ls "$@"'
NO_LIBRARY = "echo 'nvidia-cuda-mps-control -d: error while loading shared libraries: libnvidia.so.1' >&2; exit 127"
KILLED = "echo 'nvidia-cuda-mps-control -d'; kill -9 $$"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (LIST, "is not NVIDIA's MPS control program: `-h` printed"),
        (NO_LIBRARY, "`-h` ended with status 127: 'nvidia-cuda-mps-control -d: error while loading shared libraries"),
        (KILLED, "`-h` ended with status -9"),
    ],
)
async def test_a_program_that_is_broken_or_another_one_cannot_be_used(place: Place, does: str, said: str) -> None:
    whole = place.program.read_text()
    place.program.write_text(f"#!/bin/sh\n{does}\n")
    backend = await place.agent()
    reason = await backend.unavailable()
    assert reason is not None
    assert said in reason
    assert "install NVIDIA's driver completely, or set mps.control_program" in reason
    place.program.write_text(whole)
    assert await backend.unavailable() is None
    await backend.start(tenant())


async def test_a_program_whose_help_names_no_options_is_identified_by_its_message_without_a_daemon(place: Place) -> None:
    """What the programs of drivers 535 and 550 print."""
    about = "CUDA MPS Control for Linux/Unix.\nThis program allows multiple CUDA processes to share a single GPU context."
    place.program.write_text(
        f"#!/bin/sh\n[ \"$*\" = -h ] && echo '{about}' && exit 0\necho 'Cannot find MPS control daemon process'; exit 1\n"
    )
    backend = await place.agent()
    assert await backend.unavailable() is None


async def test_a_program_that_hangs_for_a_while_is_called_again(place: Place) -> None:
    place.behave(hang=["-h"])
    backend = await place.agent(timeout_seconds=0.3)
    assert "did not end `-h` within 0.3 s" in str(await backend.unavailable())
    backend.give_up_after(30)
    place.behave()
    assert await backend.unavailable() is None
    await backend.start(tenant())


async def test_other_obstacles_are_reported(place: Place) -> None:
    deep = await place.agent(run_dir=place.root / ("d" * 60))
    assert "choose a shorter enforcement.run_dir" in str(await deep.unavailable())
    place.behave(protocols=[2])
    assert "does not support MPS protocol 3" in str(await (await place.agent(protocol="3")).unavailable())


async def test_mig_devices_are_refused(place: Place) -> None:
    backend = await place.agent()
    with pytest.raises(Refusal, match="not MIG devices"):
        await backend.start(tenant(uuid="MIG-0fe1c342"))
    with pytest.raises(Refusal, match="MPS limits a container on one GPU only"):
        await backend.start(gpu_share("a1", *TWO_GPUS))


@pytest.mark.parametrize(
    ("protocol", "behaviour", "said"),
    [
        ("2", {"garbage": "Segmentation fault\nabc"}, r"answered 'Segmentation fault\nabc', not process ids"),
        ("auto", {"refuse_start": "Failed to create the log file"}, "'Failed to create the log file'"),
        ("auto", {"forget_limits": True}, "did not accept the limits of namespace a1"),
        ("2", {"forget_limits": True}, "did not accept the limits of its clients, it answers '100.0"),
        # driver 470: it answers an unknown command with exit status 0
        ("2", {"knows_memory_limits": False}, 'Unknown command "set_default_device_pinned_mem_limit"'),
    ],
)
async def test_a_daemon_that_does_not_do_what_it_should_is_refused_with_its_answer_until_it_does(
    place: Place, protocol: str, behaviour: dict[str, Any], said: str
) -> None:
    backend = await place.agent(protocol=protocol)
    place.behave(**behaviour)
    assert said in await refusal_of(backend)
    place.behave()
    await place.pass_time(backend)
    assert await place.limits(backend, tenant()) == (30, 3 * GIB), "the limits are set again"


async def test_without_exclusive_mode_a_gpu_is_not_shared(place: Place) -> None:
    place.modes.broken = "Insufficient Permissions"
    said = await refusal_of(await place.agent())
    assert "can't be put in compute mode EXCLUSIVE_PROCESS" in said
    assert "Insufficient Permissions; run gpumgr as root, or set mps.exclusive_process to false" in said
    assert place.daemon_pid() is None


#: In place of nsenter: it enters the agent's own mount namespace, which has no systemd.
INTO_OURSELVES = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
SYSTEMD = "echo systemd-run /usr/bin/systemd-run"


@pytest.mark.parametrize(
    ("nsenter", "timeout_seconds", "said"),
    [
        (INTO_OURSELVES, 30.0, "; give the pod `privileged: true` and `hostPID: true`"),
        ("echo 'Operation not permitted' >&2; exit 1", 30.0, "'Operation not permitted'; give the pod"),
        (SYSTEMD, 30.0, "was not found on the host; it comes with the driver"),
        (f"{SYSTEMD}; echo program /bin/true", 30.0, "or `mountPropagation: HostToContainer` for that volume"),
        ("exec sleep 60", 0.1, "did not end"),
    ],
)
async def test_in_a_pod_daemons_must_be_started_on_the_host(
    place: Place, monkeypatch: pytest.MonkeyPatch, nsenter: str, timeout_seconds: float, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{place.root}:{os.environ['PATH']}")
    monkeypatch.setattr(control, "_receives_mounts", lambda _: False)
    program(place.root / "nsenter", nsenter)
    backend = await place.agent(method="host", timeout_seconds=timeout_seconds)
    assert said in str(await backend.unavailable())


# -- programs that do not end, or answer something else -----------------------------------------------------------------------


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
    assert backend.daemon.trouble is None


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
    daemon = backend.daemon
    assert (daemon.trouble, daemon.pid) == (None, pid)


async def test_an_older_program_while_containers_use_protocol_3_asks_to_drain_the_node(place: Place) -> None:
    backend = await place.started()
    place.behave(protocols=[2])
    assert "does not support MPS protocol 3" in str(await backend.unavailable())
    assert backend.daemon.config.protocol == 3


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
