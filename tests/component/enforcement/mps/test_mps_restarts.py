"""Daemons over crashes and restarts of the agent."""

import os

from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.commands import ProtocolSetting
from tests.background import until
from tests.component.enforcement.mps.place import BOTH, IDLE_SECONDS, Place, running, tenant


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
        _, got = await place.attach(backend, each)
        assert (got["percentage"], got["memory"]) == (each.gpus[0].cores, each.gpus[0].memory_bytes)
    (daemon,) = backend.daemons()
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
    (daemon,) = new.daemons()
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
    pid = place.daemon_pid()
    assert pid is not None
    assert not (place.folder.pipe / "nvidia-cuda-mps-control.pid").exists()
    await old.close()
    new = await place.agent()
    await new.recover([tenant()])
    (daemon,) = new.daemons()
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
