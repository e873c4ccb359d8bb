"""Daemons that hang or crash again and again."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest

from gpumgr.common.errors import MpsError, Refusal
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.backend import Mps
from tests.background import until
from tests.component.enforcement.mps.place import CHECK_SECONDS, IDLE_SECONDS, UUID, Place, running, tenant


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
    pid = place.daemon_pid()
    assert pid is not None
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
        (daemon,) = backend.daemons()
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
    before = place.daemon_pid()
    assert before is not None
    backend.give_up_after(0.3)
    os.kill(before, signal.SIGSTOP)
    await place.pass_time(backend)
    with pytest.raises(Refusal, match=r"did not end .* replaced when the other containers on it have ended \(1\)"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == before
    backend.daemons()[0].unused = frozenset({"a1"})
    backend.give_up_after(30)
    await backend.start(tenant("b2"))
    assert place.daemon_pid() not in (None, before)
    _, got = await place.attach(backend, tenant("b2"))
    assert got["percentage"] == 30


async def test_a_new_container_starts_a_daemon_whose_restart_took_too_long(place: Place) -> None:
    """It has ended, so it can't hold up a container until the others have ended."""
    backend = await place.started(protocol="2")
    place.behave(hang=["-d"])
    await place.kill_daemon()
    backend.give_up_after(0.3)
    await place.pass_time(backend)
    assert backend.daemons()[0].trouble is not None
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
    assert backend.daemons()[0].restarts == 1
    await place.pass_time(backend, 0.0)
    for _ in range(20):
        await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert 1 < daemon.restarts < 10
    (finding,) = await backend.observe([running(tenant())])
    assert finding.code == "broken"
    place.behave()
    await place.pass_time(backend, 60)
    assert backend.daemons()[0].trouble is None
    assert place.daemon_pid() is not None


async def test_a_stopped_daemon_does_not_keep_the_others_waiting(place: Place) -> None:
    backend = Mps(**place.settings())
    await backend.open(keep_protocol=True)
    await backend.start(tenant())
    pid = place.daemon_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        await place.pass_time(backend)
        await backend.close()
    os.kill(pid, signal.SIGCONT)
    assert place.daemon_pid() == pid
