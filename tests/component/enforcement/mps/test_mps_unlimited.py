"""Containers without limits on GPUs that MPS has for itself."""

from gpumgr.enforcement.mps.backend import UnlimitedMps
from gpumgr.enforcement.mps.commands import ProtocolSetting
from gpumgr.ledger.gpu_share import GpuShare
from tests.component.enforcement.mps.place import BOTH, GIB, UUID, Place, running, tenant
from tests.shares import gpu_share, shared_gpu

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
    _, got = await place.attach(exempt, OPEN)
    assert (got["percentage"], got["memory"]) == (100, 80 * GIB)
    _, got = await place.attach(mps, tenant("a1"))
    assert (got["percentage"], got["memory"]) == (30, 3 * GIB)
    assert (exempt.limits, exempt.remains(), exempt.own_pids({1: 1})) == ({}, (), ())
    assert mps.remains() == {"a1", "open"}


@BOTH
async def test_it_stays_without_limits_over_a_crash_and_a_restart_of_the_agent(place: Place, setting: ProtocolSetting) -> None:
    old = await place.agent(protocol=setting)
    await UnlimitedMps(old, ignore).start(OPEN)
    await old.close()
    await place.kill_daemon()
    new = await place.agent(protocol=setting)
    exempt = UnlimitedMps(new, ignore)
    await new.recover([])
    await exempt.recover([OPEN])
    _, got = await place.attach(exempt, OPEN)
    assert (got["percentage"], got["memory"]) == (100, 80 * GIB)
    await exempt.cleanup("open")
    await new.cleanup("open")
    assert new.remains() == set()


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
