"""Daemons that hang or crash again and again, and servers that are blocked, so that their new clients hang."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.errors import MpsError, Refusal
from gpumgr.enforcement import cuda_client
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.processes import CLIENT
from tests.background import until
from tests.component.enforcement.mps.place import CHECK_SECONDS, GIB, IDLE_SECONDS, UUID, Place, Unhurried, own, running, tenant


async def test_a_hung_daemon_is_reported_for_its_containers_and_not_killed(place: Place) -> None:
    place.behave(protocols=[2])
    backend = await place.started()
    pid = place.daemon_pid()
    backend.give_up_after(0.3)
    place.behave(protocols=[2], hang=["get_server_list"])
    await place.pass_time(backend)
    (finding,) = await backend.observe([running(tenant(), os.getpid())])
    assert (finding.code, "did not end `get_server_list`" in finding.message) == ("broken", True)
    with pytest.raises(Refusal, match="did not end `get_server_list`"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == pid
    backend.give_up_after(30)
    place.behave(protocols=[2])
    await place.pass_time(backend)
    assert await backend.observe([running(tenant(), os.getpid())]) == []


async def test_a_daemon_without_a_pid_file_and_with_a_full_queue_is_not_started_twice(place: Place) -> None:
    place.behave(protocols=[2], pid_file=False)
    backend = await place.started()
    pid = place.running_daemon()
    backend.give_up_after(0.3)
    os.kill(pid, signal.SIGSTOP)
    with contextlib.ExitStack() as queue:
        with contextlib.suppress(BlockingIOError):
            while True:
                client = queue.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                client.setblocking(False)
                client.connect(str(place.folder.pipe / "control_privileged"))
        with pytest.raises(MpsError, match="accepts no connections"):
            processes.find_daemon(place.folder.pipe)
        await backend.adjust(())
        place.seconds += CHECK_SECONDS
        await backend.adjust(())
        daemon = backend.daemon
        assert (daemon.pid, daemon.restarts, daemon.trouble is None) == (pid, 0, False)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: accepts_connections(place))


def accepts_connections(place: Place) -> bool:
    with contextlib.suppress(MpsError):
        return processes.find_daemon(place.folder.pipe) is not None
    return False


async def test_an_idle_daemon_that_hangs_is_taken_away(place: Place) -> None:
    place.behave(protocols=[2])
    backend = await place.started()
    await backend.cleanup("a1")
    backend.give_up_after(0.3)
    place.behave(protocols=[2], hang=["get_server_list", "quit"])
    await place.pass_time(backend)
    await place.pass_time(backend, IDLE_SECONDS)
    await until(lambda: not place.folder.root.exists())
    assert (place.daemon_pid(), place.modes.now) == (None, {UUID: 0})


async def test_a_new_container_replaces_a_daemon_that_does_not_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a stopped server blocks every command to its daemon."""
    monkeypatch.setattr("gpumgr.enforcement.mps.daemon._QUIT_SECONDS", 0.2)
    backend = await place.started(protocol="2")
    before = place.running_daemon()
    backend.give_up_after(0.3)
    os.kill(before, signal.SIGSTOP)
    await place.pass_time(backend)
    with pytest.raises(Refusal, match=r"did not end .* replaced when the other containers on it have ended \(1\)"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == before
    backend.daemon.unused = frozenset({"a1"})
    backend.give_up_after(30)
    await backend.start(tenant("b2"))
    assert place.daemon_pid() not in (None, before)
    assert await place.limits(backend, tenant("b2")) == (30, 3 * GIB)


async def test_a_new_container_starts_a_daemon_whose_restart_took_too_long(place: Place) -> None:
    """It has ended, so it can't hold up a container until the others have ended."""
    backend = await place.started(protocol="2")
    place.behave(hang=["-d"])
    await place.kill_daemon()
    backend.give_up_after(0.3)
    await place.pass_time(backend)
    assert backend.daemon.trouble is not None
    backend.give_up_after(30)
    place.behave()
    await backend.start(tenant("b2"))
    (restarted,) = backend.daemons()
    assert (restarted.trouble, restarted.pid) == (None, place.daemon_pid())


async def test_a_daemon_that_keeps_crashing_is_reported_and_started_again_after_pauses(place: Place) -> None:
    backend = await place.started()
    place.behave(crash=["server"])
    await place.pass_time(backend)
    await place.pass_time(backend)
    assert backend.daemon.restarts == 1
    await place.pass_time(backend, 0.0)
    for _ in range(20):
        await place.pass_time(backend)
    daemon = backend.daemon
    assert 1 < daemon.restarts < 10
    (finding,) = await backend.observe([running(tenant())])
    assert finding.code == "broken"
    place.behave()
    await place.pass_time(backend, 60)
    assert backend.daemon.trouble is None
    assert place.daemon_pid() is not None


async def test_a_stopped_daemon_does_not_keep_the_others_waiting(place: Place) -> None:
    backend = Mps(**place.settings())
    await backend.open(keep_protocol=True)
    await backend.start(tenant())
    pid = place.running_daemon()
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        await place.pass_time(backend)
        await backend.close()
    os.kill(pid, signal.SIGCONT)
    assert place.daemon_pid() == pid


# -- blocked servers are found with a new client, reported, and replaced when they can be -------------------------------------


def reconfigure(backend: Unhurried, *client: str, client_seconds: float = 0.5) -> None:
    """The program with which the agent tries its daemons."""
    assert backend._supervisor is not None
    backend._supervisor.reconfigure(replace(backend._supervisor.config, client=client, client_seconds=client_seconds))


async def for_one_user(place: Place) -> tuple[Unhurried, Daemon, Path]:
    """Without the multi-user mode. The file exists after a trial."""
    place.behave(protocols=[2], multiuser=False)
    backend = await place.started(protocol="2")
    marker = place.root / "tried"
    reconfigure(backend, "/bin/sh", "-c", f"touch {marker}; exec sleep 3600")
    daemon = backend.daemon
    return backend, daemon, marker


async def blocked(place: Place, *others: str, hangs: bool = True) -> Unhurried:
    """A client of a1 has left, its server accepts no others (if it `hangs`), and the agent has looked. `others` share the GPU."""
    backend = await place.started(protocol="2")
    reconfigure(backend, str(place.program), "attach", client_seconds=0.5 if hangs else 60.0)
    for name in others:
        await backend.start(tenant(name))
    await place.attach(backend, tenant())
    await place.pass_time(backend)
    place.behave(clients_hang=hangs)
    await place.detach()
    with capture_logs() as logs:
        # The daemon notices the end of the client when it likes. One look finds that it has left, the next one tries a new one.
        for look in range(100):
            await place.pass_time(backend)
            if (look == 1 and not hangs) or warnings(logs):
                break
        await place.pass_time(backend)  # does nothing
    assert warnings(logs) == ["mps_daemon_hangs"] * hangs
    return backend


def warnings(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["event"] for line in logs if line["log_level"] == "warning"]


async def test_it_is_reported_to_its_containers_and_replaced_by_a_new_one_if_no_other_depends_on_it(place: Place) -> None:
    backend = await blocked(place)
    (finding,) = await backend.observe([running(tenant(), os.getpid())])
    assert (finding.allocation, finding.code) == ("a1", "broken")
    assert "a trial got no context within 0.5 s" in finding.message
    before = place.daemon_pid()
    with pytest.raises(Refusal, match=r"new CUDA programs hang .* replaced when the other containers on it have ended \(1\)"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == before
    await backend.tend(lambda: {"b2"})  # a1 has ended; its record remains
    place.behave()
    await backend.start(tenant("b2"))
    assert place.daemon_pid() not in (None, before)
    assert await place.limits(backend, tenant("b2")) == (30, 3 * GIB)


async def test_it_ends_with_its_last_container_and_not_after_the_idle_time(place: Place) -> None:
    backend = await blocked(place, "b2")
    await backend.tend(lambda: {"b2"})
    assert place.daemon_pid() is not None
    await backend.tend(set)
    assert place.daemon_pid() is None


async def test_a_server_that_recovers_is_found_to_work(place: Place) -> None:
    backend = await blocked(place)
    place.behave()
    await place.pass_time(backend, CHECK_SECONDS)
    daemon = backend.daemon
    assert daemon.trial.hang is not None, "not so soon"
    await place.pass_time(backend, 60.0)
    assert daemon.trial.hang is None


@pytest.mark.parametrize("status", [1, 2, 3])
async def test_a_trial_that_does_not_get_as_far_changes_nothing(place: Place, status: int) -> None:
    """systemd-run failed (1), CUDA refused (2), or there is no libcuda (3)."""
    backend = await blocked(place)
    reconfigure(backend, "/bin/sh", "-c", f"exit {status}")
    await place.pass_time(backend, 60.0)
    daemon = backend.daemon
    assert daemon.trial.tried_at == place.seconds
    assert daemon.trial.hang is not None


async def test_a_server_that_works_is_tried_only_after_a_client_has_left_and_after_a_pause(place: Place) -> None:
    backend = await blocked(place, hangs=False)
    daemon = backend.daemon
    first = daemon.trial.tried_at
    assert (daemon.trial.hang, first) == (None, place.seconds - CHECK_SECONDS)
    daemon.trial.client_left = True
    await place.pass_time(backend, 1.0)
    assert (daemon.trial.client_left, daemon.trial.tried_at) == (True, first)
    await place.pass_time(backend, 10.0)
    assert (daemon.trial.client_left, daemon.trial.tried_at) == (False, place.seconds)


async def test_a_server_of_another_user_is_not_tried(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the agent would wait until that user's clients have ended."""
    backend, daemon, marker = await for_one_user(place)
    await place.attach(backend, tenant(), FAKE_MPS_AS_USER=str(os.geteuid() + 1))
    monkeypatch.setattr(processes, "user_of", lambda _: os.geteuid() + 1)
    daemon.trial.client_left, daemon.trial.hang = True, "the server before it hung"
    await place.pass_time(backend)
    assert daemon.servers
    await place.pass_time(backend)
    assert (backend.daemon.trial.hang, daemon.trial.client_left, marker.exists()) == (None, False, False)


async def test_a_trial_during_which_another_users_server_begins_is_no_hang(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, daemon, marker = await for_one_user(place)
    await place.attach(backend, tenant())
    await place.pass_time(backend)
    monkeypatch.setattr(processes, "user_of", lambda _: os.geteuid() + marker.exists())
    daemon.trial.client_left = True
    await place.pass_time(backend)
    assert (daemon.trial.hang, marker.exists()) == (None, True)


async def test_the_client_that_tries_a_daemon_is_not_unattributed(place: Place) -> None:
    backend = await place.started(protocol="2")
    code = "import sys; sys.stdin.read()"
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place.folder.pipe)}
    words = [sys.executable, "-S", "-c", f"print(flush=True); {code}", str(CLIENT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as program:  # noqa: ASYNC220
        assert program.stdout is not None
        program.stdout.readline()
        assert own(backend, program.pid) == {program.pid}
        program.communicate()


_LIBRARY = """
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device == 7 ? %d : 1; }
"""


@pytest.mark.parametrize(("result", "status"), [(0, 0), (2, 2)])
def test_the_client_makes_a_context(tmp_path: Path, result: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cuda.c").write_text(_LIBRARY % result)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    assert cuda_client.main(str(library), wait=False) == status
    assert capsys.readouterr().out == ("cuDevicePrimaryCtxRetain: CUDA error 2\n" if result else "")


def test_without_the_library_the_client_says_so(tmp_path: Path) -> None:
    assert cuda_client.main(str(tmp_path / "libcuda.so.1"), wait=False) == 3
