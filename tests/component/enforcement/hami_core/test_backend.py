"""The backend on real files, with real processes on the other side of the region."""

import asyncio
import os
import shutil
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import Refusal
from gpumgr.common.files import FileIdentity
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.hami_core import backend as backend_module
from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.backend import RETRY_SECONDS, HamiCore
from gpumgr.enforcement.hami_core.monitor import CHECKS_WRONG_HOST
from gpumgr.enforcement.hami_core.region import RegionFile, RegionView
from gpumgr.enforcement.operator_library import CheckedLibrary
from gpumgr.ledger.answer import Mount
from tests.component.enforcement.hami_core.harness import (
    CORES,
    ID,
    MEMORY_BYTES,
    Client,
    make_backend,
    region_of,
    running,
    tenant,
)
from tests.component.stage.stage import Clock
from tests.libvgpu import build
from tests.shares import TWO_GPUS, gpu_share


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the operator's."""
    path = tmp_path_factory.mktemp("library") / "libvgpu.so"
    build(path)
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def backend(tmp_path: Path, library: Path, clock: Clock) -> AsyncIterator[HamiCore]:
    made = make_backend(tmp_path, library, clock)
    yield made
    await made.close()


@pytest.fixture
async def region(tmp_path: Path, backend: HamiCore) -> Path:
    """The processes of a tenant that was started."""
    await backend.start(tenant())
    return region_of(tmp_path)


def codes(findings: object) -> list[str]:
    assert isinstance(findings, (list, tuple))
    return [finding.code for finding in findings if isinstance(finding, Finding)]


def with_gpu(**fields: int) -> RunningContainer:
    """The container that runs, with other figures of its GPU."""
    (gpu,) = tenant().gpus
    return running(replace(tenant(), gpus=(replace(gpu, **fields),)))


def limits_line(client: Client, region: Path) -> str:
    return client.run(region, "show")[0]


def read(folder: Path) -> RegionView:
    with closing(RegionFile.open_in(region_of(folder).parent)) as region:
        return region.read()


def until_one_waits(folder: Path) -> None:
    while read(folder).postinit_waiters == 0:
        time.sleep(0.01)


def content(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def identities(mounts: Iterable[Mount]) -> list[FileIdentity | None]:
    return [FileIdentity.at(Path(each.host_path)) for each in mounts]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


SEEDED = f"magic=19920718 version=1.2 memory={MEMORY_BYTES} cores={CORES} switch=1 recent=2 priority=1 processes="


# -- what the container gets -----------------------------------------------------------------------------------------------


async def test_the_core_call_brings_all_but_the_memory(tmp_path: Path, backend: HamiCore) -> None:
    port: Backend = backend
    answer = port.prepare(tenant(), "core")
    await port.start(tenant())
    assert answer.envs == {
        "CUDA_DEVICE_SM_LIMIT_0": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/region.cache",
        "GPU_CORE_UTILIZATION_POLICY": "force",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LIBCUDA_LOG_LEVEL": "1",
    }
    library, preload, *regions = answer.mounts
    region = str(region_of(tmp_path))
    assert regions == [
        Mount(container_path="/usr/local/vgpu/region.cache", host_path=region),
        Mount(container_path="/tmp/cudevshr.cache", host_path=region),
    ]
    assert (library.container_path, library.read_only) == ("/usr/local/vgpu/libvgpu.so", True)
    assert (preload.container_path, preload.read_only) == ("/etc/ld.so.preload", True)
    assert content(preload.host_path) == b"/usr/local/vgpu/libvgpu.so\n"
    assert mode(library.host_path) == 0o755
    assert mode(preload.host_path) == 0o644
    assert mode(region) == 0o666


@pytest.mark.hami_bug("B36, B37: limits apply to another GPU, or to the first one only")
async def test_several_gpus_are_limited_each_by_its_own_index(tmp_path: Path, backend: HamiCore) -> None:
    share = gpu_share(ID, *TWO_GPUS)
    assert backend.prepare(share, "memory").envs == {"CUDA_DEVICE_MEMORY_LIMIT_0": "2048m", "CUDA_DEVICE_MEMORY_LIMIT_1": "1024m"}
    envs = backend.prepare(share, "core").envs
    assert (envs["CUDA_DEVICE_SM_LIMIT_0"], envs["CUDA_DEVICE_SM_LIMIT_1"]) == ("20", "70")
    await backend.start(share)
    region = read(tmp_path)
    assert (region.limits_bytes[:3], region.core_limits_percent[:3]) == ((2 << 30, 1 << 30, 0), (20, 70, 100))
    assert await backend.observe([running(share)]) == []


async def test_the_response_does_not_depend_on_files_or_on_the_container(
    tmp_path: Path, library: Path, backend: HamiCore
) -> None:
    before = backend.prepare(tenant(), "core")
    await backend.start(tenant())
    other = make_backend(tmp_path, library)
    assert backend.prepare(tenant(), "core") == before == other.prepare(tenant(), "core")


async def test_without_settings_it_is_unavailable_and_refuses(tmp_path: Path) -> None:
    bare = HamiCore(
        library_path=None,
        library_sha256=None,
        library_dir=tmp_path / "lib",
        run_dir=tmp_path / "run",
        pid_in_container_of=lambda _: None,
    )
    assert "hami_core.library_path" in (await bare.unavailable() or "")
    with pytest.raises(Refusal, match=r"hami_core\.library_path"):
        await bare.start(tenant())
    with pytest.raises(Refusal, match=r"hami_core\.library_path"):
        bare.prepare(tenant(), "core")


@pytest.mark.hami_bug("B38: an upgrade replaces a library in use")
async def test_another_library_is_for_new_containers_and_leaves_the_mounts_of_running_ones(
    tmp_path: Path, library: Path, backend: HamiCore
) -> None:
    await backend.start(tenant())
    mounts = backend.prepare(tenant(), "core").mounts
    before = identities(mounts)
    newer = tmp_path / "newer.so"
    newer.write_bytes(content(library) + b"newer")
    backend.supply(newer, sha256(newer.read_bytes()).hexdigest())
    await backend.start(tenant("b" * 16))
    answer = backend.prepare(tenant("b" * 16), "core")
    assert content(answer.mounts[0].host_path) == content(newer)
    assert content(answer.mounts[1].host_path) == b"/usr/local/vgpu/libvgpu.so\n"
    assert identities(mounts) == before
    assert await backend.observe([running()]) == []


async def test_a_container_finds_its_library_if_another_one_is_used_before_its_start(
    tmp_path: Path, library: Path, backend: HamiCore
) -> None:
    answer = backend.prepare(tenant(), "core")
    newer = tmp_path / "newer.so"
    newer.write_bytes(content(library) + b"newer")
    backend.supply(newer, sha256(newer.read_bytes()).hexdigest())
    await backend.start(tenant())
    assert [content(each.host_path) for each in answer.mounts[:2]] == [content(library), b"/usr/local/vgpu/libvgpu.so\n"]


async def test_a_wrong_library_refuses_the_start_and_leaves_nothing(tmp_path: Path, library: Path) -> None:
    mine = tmp_path / "libvgpu.so"
    mine.write_bytes(content(library))
    backend = make_backend(tmp_path, mine)
    assert await backend.unavailable() is None
    mine.write_bytes(content(library) + b"another build")
    assert "has SHA-256" in (await backend.unavailable() or "")
    with pytest.raises(
        Refusal, match=r"can't start with the backend hami-core: .* has SHA-256 .* is set: put the right file there"
    ):
        await backend.start(tenant())
    assert not (tmp_path / "lib").exists()
    assert not region_of(tmp_path).exists()


async def test_a_library_that_does_not_answer_is_not_tried_at_each_start(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[CheckedLibrary] = []

    def refusal(library: CheckedLibrary) -> str:
        tries.append(library)
        return "it made no region within 15 s"

    monkeypatch.setattr(backend_module, "refusal", refusal)
    mine = tmp_path / "libvgpu.so"
    build(mine)
    backend = make_backend(tmp_path, mine, clock)

    async def start(number: int) -> None:
        with pytest.raises(Refusal, match="it made no region within 15 s"):
            await backend.start(tenant(f"{number:016x}"))

    await asyncio.gather(*(start(number) for number in range(20)))
    clock.now += RETRY_SECONDS - 1
    await start(20)
    assert len(tries) == 1
    clock.now += 1
    await start(21)
    assert len(tries) == 2
    monkeypatch.setattr(backend_module, "refusal", lambda _: None)
    backend.supply(mine, build(mine, "-DNEEDS", "-Wl,-z,lazy"))  # another file
    await backend.start(tenant())
    monkeypatch.undo()
    await backend.close()


@pytest.mark.parametrize(("cores", "memory_bytes"), [(-1, 1 << 30), (100, 1 << 30), (30, 0)])
async def test_limits_that_mean_unlimited_are_refused(tmp_path: Path, backend: HamiCore, cores: int, memory_bytes: int) -> None:
    """A start is refused, too, if its folder can't be made."""
    with pytest.raises(Refusal, match=r"team/p \(main\) can't start with the backend hami-core"):
        await backend.start(tenant(cores=cores, memory_bytes=memory_bytes))
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(Refusal, match=r"can't start with the backend hami-core: .*/run.*"):
        await backend.start(tenant())


# -- starts ----------------------------------------------------------------------------------------------------------------


async def test_the_library_side_works_on_a_seeded_region(backend: HamiCore, region: Path, client: Client) -> None:
    said = client.run(region, "show", "take", "alloc", 900 << 20, "alloc", 200 << 20, "show")
    assert said[0] == f"{SEEDED}0"
    assert said[2:] == ["granted", "refused", f"{SEEDED}1"]
    assert codes(await backend.observe([running()])) == []


async def test_each_start_has_a_fresh_region(backend: HamiCore, region: Path, client: Client) -> None:
    first = os.stat(region).st_ino
    client.run(region, "take", "use", 1 << 29, "raise", 1 << 40, 100)
    held = os.open(region, os.O_RDONLY)  # as the ended container's mount would: the number is not free to be used again
    await backend.start(tenant())
    assert os.stat(region).st_ino != first
    os.close(held)
    assert mode(region) == 0o666
    assert limits_line(client, region) == f"{SEEDED}0"
    assert codes(await backend.observe([running()])) == []


# -- tampering -------------------------------------------------------------------------------------------------------------


@pytest.mark.hami_bug("B34: a tenant removes the library or changes limits")
async def test_a_raised_limit_is_reported_and_reset_each_time(backend: HamiCore, region: Path, client: Client) -> None:
    for _ in range(2):
        client.run(region, "raise", 64 << 30, 100, "priority", 0, "switch", 0)
        assert await backend.observe([running()]) == []
        assert "memory=68719476736" in limits_line(client, region)  # looking changes nothing
        await backend.adjust([running()])
        assert limits_line(client, region) == f"{SEEDED}0"
        (finding,) = await backend.observe([running()])
        assert (finding.allocation, finding.code) == (ID, "tampered")
        assert finding.message.startswith(
            "team/p (main) changed its limits in HAMi-core's region: memory limit 65536 MiB instead of"
        )
        assert codes(await backend.observe([running()])) == []
    client.run(region, "switch", 0)
    await backend.adjust([running()])
    assert codes(await backend.observe([running()])) == [], "the switch alone is set back in silence"
    assert limits_line(client, region) == f"{SEEDED}0"


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ([{"burst_bytes": size << 20} for size in (512, 100, 0, 512)], [(30, 1536), (30, 1124), (30, 1024), (30, 1536)]),
        ([{"cores": 60, "memory_bytes": 4 << 30}, {"cores": 10, "memory_bytes": 300 << 20}], [(60, 4096), (10, 300)]),
    ],
    ids=["burst", "resize"],
)
async def test_a_changed_grant_changes_the_limits_and_is_no_tampering_even_if_the_agent_ended_before_the_change(
    tmp_path: Path,
    library: Path,
    backend: HamiCore,
    region: Path,
    client: Client,
    changes: list[dict[str, int]],
    limits: list[tuple[int, int]],
) -> None:
    def in_force() -> tuple[int, int]:
        seen = read(tmp_path)
        return seen.core_limits_percent[0], seen.limits_bytes[0] >> 20

    for change, wanted in zip(changes, limits, strict=True):
        assert codes(await backend.observe([with_gpu(**change)])) == []
        assert await backend.adjust([with_gpu(**change)]) == {}
        assert in_force() == wanted
    client.run(region, "raise", 64 << 30, CORES)
    await backend.adjust([with_gpu(**changes[1])])
    assert codes(await backend.observe([with_gpu(**changes[1])])) == ["tampered"]
    assert in_force() == limits[1]
    again = make_backend(tmp_path, library, Clock())
    await again.adjust([with_gpu(**changes[0])])
    assert codes(await again.observe([with_gpu(**changes[0])])) == [], "the former process saved this, and did not write it"
    assert in_force() == limits[0]
    await again.close()


async def test_a_limit_that_can_not_be_written_is_not_in_force(backend: HamiCore) -> None:
    await backend.start(tenant())
    unordered = gpu_share(ID, *(replace(gpu, bus_id=None) for gpu in TWO_GPUS))
    assert "does not show the PCI bus id" in (await backend.adjust([running(unordered)]))[ID]
    assert await backend.adjust([running()]) == {}


async def test_a_file_that_grows_is_cut_and_its_limits_are_restored(backend: HamiCore, region: Path, client: Client) -> None:
    client.run(region, "grow", 1 << 20, "raise", 64 << 30, 100)
    await backend.adjust([running()])
    assert limits_line(client, region) == f"{SEEDED}0"
    assert os.stat(region).st_size == layout.FILE_BYTES
    findings = await backend.observe([running()])
    assert codes(findings) == ["tampered", "tampered"]
    assert "the file was 1048576 bytes longer" in findings[0].message
    client.run(region, "grow", 1)
    assert codes(await backend.observe([running()])) == ["tampered"]
    assert os.stat(region).st_size == layout.FILE_BYTES


async def test_nothing_is_written_while_nothing_differs(backend: HamiCore, region: Path, client: Client) -> None:
    with client.process(region, "take", "use", 4096) as pid:
        await backend.adjust([running(pids=[pid])])
        before = os.stat(region).st_mtime_ns
        await backend.adjust([running(pids=[pid])])
        assert os.stat(region).st_mtime_ns == before


@pytest.mark.parametrize("spoil", [("count", -7), ("count", 1 << 30), ("version", 1, 1), ("magic", 0)])
async def test_a_corrupt_region_is_reported_once_and_its_limits_are_kept(
    backend: HamiCore, region: Path, client: Client, spoil: tuple[object, ...]
) -> None:
    client.run(region, "raise", 64 << 30, 100, *spoil)
    await backend.adjust([running()])
    assert codes(await backend.observe([running()])) == ["tampered", "tampered"]
    assert f"memory={MEMORY_BYTES} cores={CORES}" in limits_line(client, region)
    assert codes(await backend.observe([running()])) == []


@pytest.mark.parametrize("spoil", [("truncate", 0), ("truncate", 5000), ("symlink", "/etc/passwd"), ("fifo",)])
async def test_a_lost_region_is_reported_once_and_not_written(
    backend: HamiCore, region: Path, client: Client, spoil: tuple[object, ...]
) -> None:
    client.run(region, *spoil)
    there = os.lstat(region)
    (finding,) = await backend.observe([running(gpu_pids=[1])])
    assert finding.code == "broken"
    assert "restart the container" in finding.message
    for _ in range(4):
        assert (await backend.adjust([running()])).keys() == {ID}
        assert codes(await backend.observe([running(gpu_pids=[1])])) == []
    assert (os.lstat(region).st_ino, os.lstat(region).st_size) == (there.st_ino, there.st_size)
    await backend.start(tenant())
    assert limits_line(client, region) == f"{SEEDED}0"
    assert codes(await backend.observe([running()])) == []


# -- processes -------------------------------------------------------------------------------------------------------------


async def test_a_process_gets_its_host_number(tmp_path: Path, backend: HamiCore, region: Path, client: Client) -> None:
    with client.process(region, "take") as unknown, client.process(region, "take", "host", 4_000_000) as strange:
        await backend.adjust([running(pids=[unknown, strange])])
        assert [(slot.pid, slot.hostpid) for slot in read(tmp_path).slots] == [(unknown, unknown), (strange, strange)]
        assert codes(await backend.observe([running(pids=[unknown, strange], gpu_pids=[unknown, strange])])) == []


async def test_a_process_without_a_slot_is_reported_once_after_three_checks(
    backend: HamiCore, region: Path, client: Client
) -> None:
    with client.process(region, "take") as known, client.process(region, "show") as past:
        now = running(pids=[known, past], gpu_pids=[known, past])
        found = [await backend.observe([now]) for _ in range(5)]
        assert [codes(each) for each in found] == [[], [], ["unregistered"], [], []]
        assert f"in process {past}:" in found[2][0].message
        await backend.observe([running(pids=[known])])  # it released its context
        assert [codes(await backend.observe([now])) for _ in range(3)] == [[], [], ["unregistered"]]


async def test_a_process_is_identified_by_its_host_pid_alone(backend: HamiCore, region: Path, client: Client) -> None:
    gone = 4_000_000_000 >> 1  # above every host pid: its pid in the container is unknown
    client.run(region, "take", "host", gone)
    assert [codes(await backend.observe([running(gpu_pids=[gone])])) for _ in range(3)] == [[], [], []]


async def test_the_lock_of_a_killed_writer_is_ended_after_two_seconds(
    tmp_path: Path, backend: HamiCore, region: Path, client: Client, clock: Clock
) -> None:
    with client.process(region, "take", "lock") as killed, client.process(region, "take", "lock") as slow:
        await backend.adjust([running(pids=[killed, slow])])
        os.kill(killed, signal.SIGKILL)
        await backend.adjust([running(pids=[slow])])
        clock.now += 1.9
        await backend.adjust([running(pids=[slow])])
        assert [(slot.pid, slot.stuck) for slot in read(tmp_path).slots] == [(killed, True), (slow, True)]
        clock.now += 0.2
        await backend.adjust([running(pids=[slow])])
        assert [(slot.pid, slot.stuck) for slot in read(tmp_path).slots] == [(killed, False), (slow, True)]


@pytest.mark.parametrize("spoil", [("host", 0), ("host", 0, "search"), ("host", 4_000_000, "lock")])
async def test_a_container_that_writes_its_host_pid_all_the_time_is_reported_once(
    tmp_path: Path, backend: HamiCore, region: Path, client: Client, spoil: tuple[object, ...]
) -> None:
    """Also while it writes that the library looks for the pid, or that its slot is being written."""
    with client.process(region, "take", *spoil) as pid:
        now, spoilt, found = running(pids=[pid]), content(region), list[Finding]()
        for checks in range(1, CHECKS_WRONG_HOST + 5):
            await asyncio.to_thread(region.write_bytes, spoilt)
            await backend.adjust([now])
            found += await backend.observe([now])
            assert (codes(found) == ["tampered"]) is (checks >= CHECKS_WRONG_HOST)
        assert f"host pid {spoil[1]} of process {pid} instead of {pid} at {CHECKS_WRONG_HOST} checks" in found[0].message
        assert [(slot.pid, slot.hostpid) for slot in read(tmp_path).slots] == [(pid, pid)]


async def test_processes_wait_five_seconds_for_one_that_was_killed_in_its_start(
    tmp_path: Path, backend: HamiCore, region: Path, client: Client, clock: Clock
) -> None:
    with client.process(region, "take", "search") as killed, client.waiting(region, "take") as waiter:
        until_one_waits(tmp_path)
        now = running(pids=[killed, waiter.pid])
        await backend.adjust([now])
        clock.now += 6
        await backend.adjust([now])  # the holder runs: two processes have no host pid, one of them waits
        assert read(tmp_path).postinit == 0
        os.kill(killed, signal.SIGKILL)
        now = running(pids=[waiter.pid])
        await backend.adjust([now])
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == f"slot 1 process {waiter.pid}\n"
    (finding,) = await backend.observe([now])
    assert (finding.code, "was killed while HAMi-core started in it" in finding.message) == ("broken", True)
    assert read(tmp_path).postinit == 1


async def test_a_semaphore_that_changes_hands_is_left_alone_and_none_is_kept_for_ever(
    tmp_path: Path, backend: HamiCore, region: Path, client: Client, clock: Clock
) -> None:
    with client.process(region, "take", "search") as first:
        await backend.adjust([running(pids=[first])])
        clock.now += 29
        with client.waiting(region, "take") as second:
            until_one_waits(tmp_path)
            now = running(pids=[first, second.pid])
            for seconds in (0, 29):
                clock.now += seconds
                await backend.adjust([now])
                assert read(tmp_path).postinit == 0
            clock.now += 2
            await backend.adjust([now])
            assert second.wait(timeout=60) == 0


# -- lives of the agent ----------------------------------------------------------------------------------------------------


async def test_a_restarted_agent_takes_over_regions(
    tmp_path: Path, library: Path, backend: HamiCore, region: Path, client: Client
) -> None:
    await backend.close()
    inode = os.stat(region).st_ino
    client.run(region, "raise", 64 << 30, 100)
    again = make_backend(tmp_path, library)
    not_started = tenant("ffffffffffffffff")
    await again.recover([tenant(), not_started])
    assert set(again.remains()) == {ID}
    await again.adjust([running()])
    assert codes(await again.observe([running()])) == []
    assert (limits_line(client, region), os.stat(region).st_ino) == (f"{SEEDED}0", inode)
    await again.close()


async def test_a_region_that_the_agent_did_not_create_is_reported_once(backend: HamiCore) -> None:
    (finding,) = await backend.observe([running()])
    assert (finding.code, "restart the container" in finding.message) == ("broken", True)
    await backend.adjust([running()])
    assert codes(await backend.observe([running()])) == []


async def test_cleanup_removes_all_of_one_allocation(tmp_path: Path, backend: HamiCore) -> None:
    assert set(backend.remains()) == set()
    await backend.start(tenant())
    await backend.start(tenant("ffffffffffffffff"))
    await backend.cleanup(ID)
    await backend.cleanup(ID)
    assert set(backend.remains()) == {"ffffffffffffffff"}
    assert not region_of(tmp_path).parent.exists()
    assert region_of(tmp_path, "ffffffffffffffff").exists()
    assert set(backend.own_pids({1: 1})) == set()


async def test_a_folder_that_is_gone_or_unreadable(tmp_path: Path, backend: HamiCore) -> None:
    await backend.start(tenant())
    shutil.rmtree(tmp_path / "run")
    assert set(backend.remains()) == set()
    assert codes(await backend.observe([running()])) == ["broken"]
    await backend.adjust([running()])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hami-core").write_text("in the way")
    with pytest.raises(NotADirectoryError):  # the caller reports it and lists again later
        backend.remains()
    await backend.recover([tenant("ffffffffffffffff")])


async def test_starts_and_checks_leave_no_open_files(backend: HamiCore, region: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await backend.start(tenant())
        await backend.observe([running()])
    assert len(os.listdir("/proc/self/fd")) == before
    await backend.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert stat.S_ISREG(os.stat(region).st_mode)  # the container goes on


def word(path: Path, value: int | None = None) -> int:
    """recent_kernel, at its documented place (i32 at 2008904); with a value it is written first, as the library does."""
    with path.open("r+b") as file:
        if value is not None:
            file.seek(2008904)
            file.write(value.to_bytes(4, "little", signed=True))
        file.seek(2008904)
        return int.from_bytes(file.read(4), "little", signed=True)


async def test_a_lower_priority_waits_while_a_higher_one_launches(tmp_path: Path, library: Path, backend: HamiCore) -> None:
    first, later = tenant("a" * 16, priority=0), tenant("b" * 16)
    here = [running(first), running(later)]
    for each in (first, later):
        await backend.start(each)
    high, low = (region_of(tmp_path, each.allocation) for each in (first, later))
    word(high, 2)
    word(low, 2)
    before = low.read_bytes()
    await backend.adjust(here)
    assert (word(high), word(low)) == (1, -1)
    after = low.read_bytes()
    assert (after[:2008904], after[2008908:]) == (before[:2008904], before[2008908:])
    word(low, 2)  # a launch that was under way
    word(high, 2)
    await backend.adjust(here)
    assert word(low) == -1
    await backend.adjust(here)
    assert (word(high), word(low)) == (0, 0), "two seconds after the last launch"
    assert await backend.observe(here) == []

    word(high, 2)
    await backend.adjust(here)
    other = make_backend(tmp_path, library)  # the agent was killed, and the first container has ended
    await other.adjust([running(later)])
    assert word(low) == 0
    await other.close()
    await backend.adjust(here)
    word(high, 2)
    await backend.adjust(here)
    assert word(low) == -1
    other = make_backend(tmp_path, library)
    word(high, 2)
    await other.adjust(here)
    assert word(low) == -1, "as it was"
    await other.close()
    assert word(low) == 0, "no agent would end the wait, also one of an earlier process"
    word(high, 2)
    await backend.adjust(here)
    assert word(low) == -1
    await backend.close()
    assert word(low) == 0
