"""Daemons over crashes and restarts of the agent, also if it can't use them as they are."""

import os
import shutil
from pathlib import Path

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.commands import ProtocolSetting
from gpumgr.enforcement.mps.compute_mode import EXCLUSIVE_PROCESS
from tests.background import until
from tests.component.enforcement.mps.place import BOTH, GIB, IDLE_SECONDS, UUID, Place, running, tenant


@BOTH
async def test_a_killed_daemon_is_started_again_with_all_its_containers(place: Place, setting: ProtocolSetting) -> None:
    backend = await place.agent(protocol=setting)
    first, second = tenant("a1"), tenant("b2", cores=60)
    await backend.start(first)
    await backend.start(second)
    mounted = place.folder.namespace("a1") if setting == "3" else place.folder.pipe
    inode = mounted.stat().st_ino
    killed = await place.kill_daemon()
    await place.pass_time(backend)
    assert place.daemon_pid() not in (None, killed)
    assert mounted.stat().st_ino == inode, "containers have this folder mounted"
    for each in (first, second):
        assert await place.limits(backend, each) == (each.gpus[0].cores, each.gpus[0].memory_bytes)
    daemon = backend.daemon
    assert (daemon.pid, len(daemon.folder.allocations()), daemon.restarts, daemon.trouble) == (place.daemon_pid(), 2, 1, None)


@BOTH
async def test_a_new_agent_adopts_the_daemon_and_clients_go_on(place: Place, setting: ProtocolSetting) -> None:
    old = await place.started(protocol=setting)
    client, _ = await place.attach(old, tenant())
    pid = place.daemon_pid()
    await old.close()
    assert place.daemon_pid() == pid
    new = await place.agent()
    await new.recover([tenant()])
    daemon = new.daemon
    assert (daemon.pid, len(daemon.clients), daemon.restarts) == (pid, 1, 0)
    assert start_time_ticks(client) is not None
    await new.start(tenant("b2"))
    assert place.daemon_pid() == pid
    assert await new.observe([running(tenant(), client, gpu=(client,))]) == []


async def test_servers_without_their_daemon_keep_their_clients_and_end_without_clients(place: Place) -> None:
    place.behave(servers_outlive=True)
    backend = await place.started(protocol="2")
    _, got = await place.attach(backend, tenant())
    await place.pass_time(backend)
    await place.kill_daemon()
    await place.pass_time(backend)
    assert start_time_ticks(got["server"]) is not None, "work goes on there"
    _, fresh = await place.attach(backend, tenant())
    await place.pass_time(backend, 15.0)
    await place.detach()
    await place.kill_daemon()
    await place.pass_time(backend)
    await until(lambda: start_time_ticks(fresh["server"]) is None)


async def test_a_daemon_without_a_pid_file_is_found_adopted_and_ended(place: Place) -> None:
    """Drivers 470 and 535 write none."""
    place.behave(pid_file=False)
    old = await place.started(protocol="2")
    client, got = await place.attach(old, tenant())
    assert (got["percentage"], got["memory"]) == (tenant().gpus[0].cores, tenant().gpus[0].memory_bytes)
    pid = place.running_daemon()
    assert not (place.folder.pipe / "nvidia-cuda-mps-control.pid").exists()
    new = await place.restarted(old, tenant())
    daemon = new.daemon
    assert (daemon.pid, daemon.restarts, list(daemon.clients)) == (pid, 0, [client])
    await place.detach()
    await new.cleanup("a1")
    await place.pass_time(new)
    await place.pass_time(new, IDLE_SECONDS)
    assert start_time_ticks(pid) is None
    assert place.daemon_pid() is None


async def test_a_pid_file_of_another_process_is_not_believed(place: Place) -> None:
    backend = await place.started()
    await place.kill_daemon()
    (place.folder.pipe / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert processes.find_daemon(place.folder.pipe) is None
    await place.pass_time(backend)
    assert place.daemon_pid() not in (None, os.getpid())


async def begun(place: Place, setting: ProtocolSetting = "auto") -> int:
    """An agent process that ended and left a daemon for a1. Returns the daemon's pid."""
    old = await place.started(protocol=setting)
    await old.close()
    return place.running_daemon()


# -- the program is gone -----------------------------------------------------------------------------------------------------


@BOTH
async def test_without_the_program_daemons_are_found_and_their_containers_reported(
    place: Place, setting: ProtocolSetting
) -> None:
    pid = await begun(place, setting)
    hidden = place.program.rename(place.root / "hidden")
    new = await place.agent()
    assert "was not found" in str(await new.unavailable())
    await new.recover([tenant()])
    assert [daemon.pid for daemon in new.daemons()] == [pid]
    assert new.remains() == {"a1"}
    (finding,) = await new.observe([running(tenant(), os.getpid())])
    assert (finding.allocation, finding.code) == ("a1", "broken")
    assert "can't run" in finding.message
    with pytest.raises(Refusal, match=r"demo/pod-b2 .* can't start with the backend mps"):
        await new.start(tenant("b2"))
    hidden.rename(place.program)
    assert await new.unavailable() is None
    await place.pass_time(new)
    assert await new.observe([running(tenant(), os.getpid())]) == []
    assert (new.daemon.pid, new.daemon.config.protocol) == (pid, int(setting))
    assert await place.limits(new, tenant()) == (30, 3 * GIB)


async def test_without_the_program_a_gpu_is_still_freed_for_a_whole_gpu_container(place: Place) -> None:
    await begun(place)
    place.program.unlink()
    new = await place.agent()
    await new.vacate([UUID])
    assert (place.daemon_pid(), place.modes.now, place.folder.root.exists()) == (None, {UUID: 0}, False)


# -- the folders are elsewhere -----------------------------------------------------------------------------------------------


async def test_a_daemon_in_another_run_dir_is_managed_there(place: Place) -> None:
    pid = await begun(place)
    new = await place.agent(run_dir=place.root / "new")
    await new.recover([tenant()])
    assert [(daemon.pid, len(daemon.folder.allocations())) for daemon in new.daemons()] == [(pid, 1)]
    await new.start(tenant())  # its container starts again, with what it was given then
    with pytest.raises(
        Refusal, match=f"have their MPS daemon in {place.folder.root}, from before enforcement.run_dir was changed"
    ):
        await new.start(tenant("b2"))
    assert (place.daemon_pid(), new.remains()) == (pid, {"a1"})


async def test_a_daemon_in_another_run_dir_ends_when_its_containers_are_gone(place: Place) -> None:
    place.modes.now[UUID] = 2
    await begun(place)
    new = await place.agent(run_dir=place.root / "new")
    await new.cleanup("a1")
    await new.start(tenant("b2"))
    assert place.daemon_pid() is None
    assert not place.folder.root.exists()
    daemon = new.daemon
    assert (daemon.pid is not None, len(daemon.folder.allocations())) == (True, 1)
    assert place.modes.now == {UUID: EXCLUSIVE_PROCESS}
    assert str(place.root / "new") in new.prepare(tenant("b2"), "core").envs["CUDA_MPS_PIPE_DIRECTORY"]
    assert await place.limits(new, tenant("b2")) == (30, 3 * GIB)
    await place.detach()
    await new.vacate([UUID])
    assert (place.modes.now, new.daemons()) == ({UUID: 2}, [])


@pytest.mark.parametrize("before", [0, EXCLUSIVE_PROCESS])
async def test_the_original_mode_is_restored_although_the_folder_was_emptied(place: Place, before: int) -> None:
    """An operator's own exclusive mode stays."""
    place.modes.now[UUID] = before
    await begun(place)
    await place.kill_daemon()
    shutil.rmtree(place.folder.root)
    new = await place.agent()
    await new.recover([])
    await new.start(tenant("b2"))
    assert place.former_mode() == before
    await new.vacate([UUID])
    assert place.modes.now == {UUID: before}


async def test_a_mode_of_ours_is_not_taken_for_the_one_before_when_the_records_are_lost(place: Place) -> None:
    pid = await begun(place)
    shutil.rmtree(place.root / "state")
    new = await place.agent()
    await new.recover([tenant()])
    assert place.daemon_pid() == pid
    await new.vacate([UUID])
    assert place.modes.now == {UUID: 0}


@pytest.mark.parametrize("how", ["gone", "unreadable"])
async def test_unreadable_folders_do_not_hide_daemons(place: Place, how: str, tmp_path: Path) -> None:
    pid = await begun(place)
    backend = await place.agent()
    await backend.recover([tenant()])
    tenants = place.folder.root / "tenants"
    if how == "gone":
        place.folder.root.rename(tmp_path / "away")
    else:
        tenants.rename(tmp_path / "away")
        tenants.symlink_to("tenants")  # a loop
    assert [daemon.pid for daemon in backend.daemons()] == [pid]
    if how == "gone":
        (tmp_path / "away").rename(place.folder.root)
    else:
        await place.pass_time(backend, 10 * IDLE_SECONDS)
        assert place.daemon_pid() == pid, "containers that can't be read may exist"


# -- the daemon has another protocol -----------------------------------------------------------------------------------------


@BOTH
async def test_an_idle_daemon_of_the_other_protocol_is_replaced_by_the_first_container(
    place: Place, setting: ProtocolSetting
) -> None:
    pid = await begun(place, "2" if setting == "3" else "3")
    new = await place.agent(keep_protocol=False, protocol=setting)
    await new.recover([])
    with pytest.raises(Refusal, match=r"can.t start with the backend mps"):
        await new.start(tenant("b2"))  # as far as it knows, a1 still depends on the daemon
    assert place.daemon_pid() == pid
    await place.pass_time(new, 0.0)
    await new.cleanup("a1")
    await new.start(tenant("b2"))
    assert place.daemon_pid() != pid
    _, got = await place.attach(new, tenant("b2"))
    assert (got["percentage"], new.remains()) == (30, {"b2"})
