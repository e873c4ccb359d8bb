"""How daemons end, and what they leave."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import MpsError, Refusal
from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps.commands import ProtocolSetting
from gpumgr.enforcement.mps.compute_mode import EXCLUSIVE_PROCESS
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.folders import Share
from tests.background import until
from tests.component.enforcement.mps.place import BOTH, CHECK_SECONDS, GIB, IDLE_SECONDS, UUID, Place, tenant


@BOTH
async def test_an_idle_daemon_ends_and_leaves_nothing(place: Place, setting: ProtocolSetting) -> None:
    place.modes.now[UUID] = 2
    backend = await place.started(protocol=setting)
    server = (await place.attach(backend, tenant()))[1]["server"]
    await place.detach()
    await backend.cleanup("a1")
    await place.pass_time(backend)
    await place.pass_time(backend, IDLE_SECONDS - CHECK_SECONDS)
    assert place.daemon_pid() is not None, "somebody may come soon"
    await backend.start(tenant("b2"))
    await place.pass_time(backend, 10 * IDLE_SECONDS)
    assert place.daemon_pid() is not None, "a tenant needs it, busy or not"
    await backend.cleanup("b2")
    await place.pass_time(backend)
    await place.pass_time(backend, IDLE_SECONDS)
    assert place.daemon_pid() is None
    assert start_time_ticks(server) is None
    assert place.modes.now == {UUID: 2}
    assert (backend.daemons(), place.folder.root.exists()) == ([], False)
    await backend.start(tenant("c3"))
    assert place.daemon_pid() is not None


@BOTH
async def test_the_idle_time_begins_with_the_end_of_the_last_container(place: Place, setting: ProtocolSetting) -> None:
    """Not with the removal of its record, which is kept for a while, nor with a check of the daemon."""
    backend = await place.started(protocol=setting)
    await backend.start(tenant("b2"))
    known = {"a1", "b2"}
    assert await backend.tend(lambda: known) is None
    place.seconds += 10 * IDLE_SECONDS
    known = {"b2"}
    assert await backend.tend(lambda: known) is None
    known = set()
    assert await backend.tend(lambda: known) == IDLE_SECONDS
    place.seconds += IDLE_SECONDS - 1
    assert await backend.tend(lambda: known) == 1
    assert place.daemon_pid() is not None
    place.seconds += 1
    await backend.tend(lambda: known)
    assert (place.daemon_pid(), backend.remains(), place.modes.now) == (None, set(), {UUID: 0})
    assert await backend.tend(lambda: known) is None


async def test_a_container_that_comes_while_the_end_waits_keeps_the_daemon(place: Place) -> None:
    backend = await place.started(idle_seconds=0.0)
    daemon = backend.daemon
    known = set[str]()
    async with daemon.lock:  # an admission, say
        ending = asyncio.create_task(backend.tend(lambda: known))
        await until(lambda: daemon.idle_since is not None)
        known = {"b2"}
        daemon.folder.put("b2", Share(cores=30, memory_bytes=GIB))
    await ending
    assert place.daemon_pid() is not None


async def test_a_container_without_mps_does_not_wait_for_the_idle_time(place: Place) -> None:
    backend = await place.started()
    await backend.vacate(["GPU-another"])
    assert place.daemon_pid() is not None
    await backend.vacate([UUID])
    assert (place.daemon_pid(), place.modes.now, backend.remains()) == (None, {UUID: 0}, set())


async def test_cleanup_does_not_need_the_daemon(place: Place) -> None:
    backend = await place.started()
    await place.kill_daemon()
    await backend.cleanup("a1")
    assert backend.remains() == set()
    await backend.start(tenant("b2"))
    assert place.daemon_pid() is not None
    place.behave(garbage="?")
    await backend.cleanup("b2")
    assert backend.remains() == set()


async def test_a_daemon_whose_gpu_keeps_its_mode_is_ended_again_and_not_started_for_ended_containers(place: Place) -> None:
    """Their records are kept for a while, and the GPU may be lost."""
    backend = await place.started(idle_seconds=0.0)
    place.modes.broken = "GPU is lost"
    with capture_logs() as logged:
        for _ in range(3):
            await backend.tend(set)
            assert await backend.tend(set) == CHECK_SECONDS
            place.seconds += CHECK_SECONDS
            await backend.adjust(())
    assert [each["event"] for each in logged if each["log_level"] == "warning"] == ["mps_daemon_not_ended"]
    assert (place.daemon_pid(), backend.restarts(), backend.remains(), place.former_mode()) == (None, {UUID: 0}, {"a1"}, 0)
    with pytest.raises(Refusal, match=r"MPS still uses GPU .* run `nvidia-smi -i GPU-\S+ -c 0`"):
        await backend.vacate([UUID])
    place.modes.broken = None
    await backend.tend(set)
    assert (place.modes.now, backend.daemons(), place.folder.root.exists()) == ({UUID: 0}, [], False)


async def test_an_allocation_that_is_made_again_needs_the_daemon_at_once(place: Place) -> None:
    """The ids of a claim are computed."""
    backend = await place.started()
    await backend.tend(set)
    await backend.start(tenant())
    pid = place.daemon_pid()
    backend.daemon.trial.hang = "it hangs"
    with pytest.raises(Refusal, match=r"replaced when the other containers on it have ended \(1\)"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == pid


async def test_the_compute_mode_is_set_or_restored_as_the_setting_requires(place: Place) -> None:
    old = await place.started()
    place.modes.now[UUID] = 0
    await place.pass_time(old)
    assert place.modes.now == {UUID: EXCLUSIVE_PROCESS}, "it is set again"
    await old.close()
    assert place.modes.now == {UUID: EXCLUSIVE_PROCESS}
    new = await place.agent(exclusive_process=False)
    await new.recover([tenant()])
    assert place.modes.now == {UUID: 0}
    await new.start(tenant("b2"))
    assert place.modes.now == {UUID: 0}


@pytest.mark.parametrize("error", [MpsError("it hangs"), OSError("it is busy"), AssertionError("a bug")])
async def test_an_end_that_failed_is_tried_again_after_a_pause(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    backend = await place.started()
    stop = AsyncMock(side_effect=error)
    monkeypatch.setattr(Daemon, "stop", stop)
    await backend.tend(set)
    place.seconds += IDLE_SECONDS
    await backend.tend(set)
    assert await backend.tend(set) == CHECK_SECONDS
    assert stop.await_count == 1
    place.seconds += CHECK_SECONDS
    await backend.tend(set)
    assert stop.await_count == 2
