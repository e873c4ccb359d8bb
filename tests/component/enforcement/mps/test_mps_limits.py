"""What tenants get of a daemon, also containers without limits; the control program is a fake, all else is real."""

import os
from pathlib import Path

from gpumgr.enforcement.mps.backend import UnlimitedMps
from gpumgr.enforcement.mps.commands import ProtocolSetting
from gpumgr.enforcement.mps.compute_mode import EXCLUSIVE_PROCESS
from gpumgr.ledger.gpu_share import GpuShare
from tests.component.enforcement.mps.place import BOTH, GIB, UUID, Place, own, running, tenant
from tests.shares import gpu_share, shared_gpu


@BOTH
async def test_first_use_starts_a_daemon_that_keeps_the_limits(place: Place, setting: ProtocolSetting) -> None:
    backend = await place.agent(protocol=setting)
    assert await backend.unavailable() is None
    assert backend.limits == {"core": "hard" if setting == "3" else "soft", "memory": "soft"}
    assert place.daemon_pid() is None
    await backend.start(tenant())
    pid = place.running_daemon()
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
    assert await place.limits(backend, large) == (60, 4 * GIB)
    await backend.cleanup("b2")
    assert await place.limits(backend, large) == (20, GIB)


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


# -- containers without limits ------------------------------------------------------------------------------------------------


OPEN = gpu_share("open", shared_gpu(UUID, cores=5, total_bytes=80 * GIB), pod=("demo", "pod-open"))


def ignore(_tenant: GpuShare, _message: str) -> None:
    """A daemon without a listener."""


@BOTH
async def test_an_exempt_container_has_all_of_the_gpu_and_the_others_their_limits(place: Place, setting: ProtocolSetting) -> None:
    told: list[tuple[str, str]] = []
    mps = await place.agent(protocol=setting)
    exempt = UnlimitedMps(mps, lambda who, message: told.append((who.allocation, message)))
    await mps.start(tenant("a1"))
    pid = place.daemon_pid()
    await exempt.start(OPEN)
    assert place.daemon_pid() == pid
    assert [(who, "keeps container main within its 5 cores" in message) for who, message in told] == [("open", True)]
    assert await place.limits(exempt, OPEN) == (100, 80 * GIB)
    assert await place.limits(mps, tenant("a1")) == (30, 3 * GIB)
    assert (exempt.limits, exempt.remains(), exempt.own_pids({1: 1})) == ({}, (), ())
    assert mps.remains() == {"a1", "open"}
    await place.kill_daemon()
    new = await place.restarted(mps, protocol=setting)
    assert await place.limits(UnlimitedMps(new, ignore), OPEN) == (100, 80 * GIB)


async def test_an_exempt_container_gets_a_finding_for_a_broken_daemon_only(place: Place) -> None:
    place.behave(protocols=[2])
    mps = await place.agent(exclusive_process=False)
    exempt = UnlimitedMps(mps, ignore)
    await mps.start(tenant("a1"))
    await exempt.start(OPEN)
    look, other = [running(OPEN, 1, gpu=(1,))], [running(tenant("a1"), 1, gpu=(1,))]
    for _ in range(4):
        await place.pass_time(mps)
        found = await mps.observe(other)
        assert list(await exempt.observe(look)) == []
    assert [finding.code for finding in found] == ["unregistered"], "the others keep their findings"
    place.behave(protocols=[2], garbage="?")
    await place.pass_time(mps)
    (finding,) = await exempt.observe(look)
    assert (finding.allocation, finding.code) == ("open", "broken")
