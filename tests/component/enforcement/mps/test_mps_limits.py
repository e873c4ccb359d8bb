"""What tenants get of a daemon; the control program is a fake, all else is real."""

import os
from pathlib import Path

from gpumgr.enforcement.mps.commands import ProtocolSetting
from gpumgr.enforcement.mps.compute_mode import EXCLUSIVE_PROCESS
from tests.component.enforcement.mps.place import BOTH, GIB, UUID, Place, own, running, tenant


@BOTH
async def test_first_use_starts_a_daemon_that_keeps_the_limits(place: Place, setting: ProtocolSetting) -> None:
    backend = await place.agent(protocol=setting)
    assert await backend.unavailable() is None
    assert backend.limits == {"core": "hard" if setting == "3" else "soft", "memory": "soft"}
    assert place.daemon_pid() is None
    await backend.start(tenant())
    pid = place.daemon_pid()
    assert pid is not None
    assert os.getsid(pid) != os.getsid(0)
    assert place.modes.now == {UUID: EXCLUSIVE_PROCESS}
    _, got = await place.attach(backend, tenant())
    assert (got["percentage"], got["memory"]) == (30, 3 * GIB)
    assert own(backend, pid, got["server"], os.getpid()) == {got["server"]}


async def test_two_containers_share_a_daemon_and_the_larger_is_not_bounded_by_the_server_of_the_smaller(place: Place) -> None:
    backend = await place.agent(protocol="2")
    small, large = tenant("a1", cores=20, memory_bytes=GIB), tenant("b2", cores=60, memory_bytes=4 * GIB)
    await backend.start(small)
    pid = place.daemon_pid()
    await place.attach(backend, small)  # now a server runs, with the small one's bound
    await backend.start(large)
    assert place.daemon_pid() == pid
    _, got = await place.attach(backend, large)
    assert (got["percentage"], got["memory"]) == (60, 4 * GIB)
    await backend.cleanup("b2")
    _, got = await place.attach(backend, large)
    assert (got["percentage"], got["memory"]) == (20, GIB)


async def test_in_protocol_3_a_container_cannot_choose_other_limits(place: Place) -> None:
    backend = await place.started(protocol="3")
    await backend.start(tenant("b2", cores=60))
    wider = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64G"}
    _, got = await place.attach(backend, tenant("a1"), **wider)
    assert (got["namespace"], got["percentage"], got["memory"]) == ("a1", 30, 3 * GIB)
    await backend.start(tenant("a1", cores=10))  # its container starts again
    assert place.heard().count("namespace create a1 --server=gpu") == 1
    await backend.cleanup("a1")
    assert not place.folder.namespace("a1").exists()
    assert backend.remains() == {"b2"}


async def test_the_protocol_stays_while_containers_use_it(place: Place) -> None:
    place.behave(protocols=[2])
    old = await place.started()
    given = old.prepare(tenant(), "core")
    await old.close()
    place.behave(protocols=[2, 3])  # the driver was replaced
    assert (await place.agent()).prepare(tenant(), "core") == given
    drained = await place.agent(keep_protocol=False)
    assert drained.prepare(tenant(), "core") != given
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in drained.prepare(tenant(), "core").envs


async def test_a_process_that_bypasses_mps_is_reported_after_some_checks(place: Place) -> None:
    backend = await place.started(exclusive_process=False)
    assert backend.limits["core"] == "soft"
    client, _ = await place.attach(backend, tenant())
    other = os.getpid()
    look = [running(tenant(), client, other, gpu=(client, other))]
    assert await backend.observe(look) == []
    await place.pass_time(backend)
    assert await backend.observe(look) == []
    await place.pass_time(backend)
    (finding,) = await backend.observe(look)
    assert (finding.code, finding.allocation) == ("unregistered", "a1")
    assert f"process {other} of demo/pod-a1 (main)" in finding.message


async def test_a_running_container_without_files_is_reported(place: Place, tmp_path: Path) -> None:
    backend = await place.started()
    (finding,) = await backend.observe([running(tenant("lost"))])
    assert (finding.allocation, finding.code) == ("lost", "broken")
    empty = await place.agent(run_dir=tmp_path, state_dir=tmp_path / "state")
    assert set(empty.remains()) == set()
