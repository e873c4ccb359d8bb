"""The backend on real files, with real processes on the other side of the region."""

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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


@dataclass
class Place:
    """A backend, and the region of its container."""

    folder: Path
    library: Path
    client: Client
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.backend, self.region = self.agent(), region_of(self.folder)

    def agent(self) -> HamiCore:
        """Another process of the agent."""
        return make_backend(self.folder, self.library, self.clock)

    def run(self, *commands: object) -> list[str]:
        return self.client.run(self.region, *commands)

    def process(self, *commands: object) -> contextlib.AbstractContextManager[int]:
        return self.client.process(self.region, *commands)

    def limits(self) -> str:
        return self.run("show")[0]

    def read(self) -> RegionView:
        with closing(RegionFile.open_in(self.region.parent)) as region:
            return region.read()

    async def adjust(self, *pids: int) -> Mapping[str, str]:
        return await self.backend.adjust([running(pids=pids)])

    async def observe(self, *pids: int, gpu_pids: Sequence[int] = ()) -> Sequence[Finding]:
        return await self.backend.observe([running(pids=pids, gpu_pids=gpu_pids)])

    def until_one_waits(self) -> None:
        while self.read().postinit_waiters == 0:
            time.sleep(0.01)


@pytest.fixture
async def unstarted(tmp_path: Path, library: Path, client: Client) -> AsyncIterator[Place]:
    """Before the container starts."""
    made = Place(tmp_path, library, client)
    yield made
    await made.backend.close()


@pytest.fixture
async def place(unstarted: Place) -> Place:
    await unstarted.backend.start(tenant())
    return unstarted


@pytest.fixture
def backend(unstarted: Place) -> HamiCore:
    return unstarted.backend


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def with_gpu(**fields: int) -> RunningContainer:
    """The container that runs, with other figures of its GPU."""
    (gpu,) = tenant().gpus
    return running(replace(tenant(), gpus=(replace(gpu, **fields),)))


def content(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def identities(mounts: Iterable[Mount]) -> list[FileIdentity | None]:
    return [FileIdentity.at(Path(each.host_path)) for each in mounts]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


SEEDED = f"magic=19920718 version=1.2 memory={MEMORY_BYTES} cores={CORES} switch=1 recent=2 priority=1 processes="


# -- what the container gets -----------------------------------------------------------------------------------------------


async def test_the_core_call_brings_all_but_the_memory(unstarted: Place) -> None:
    port: Backend = unstarted.backend
    answer = port.prepare(tenant(), "core")
    assert [content(each.host_path) for each in answer.mounts[:2]] == [
        content(unstarted.library),
        b"/usr/local/vgpu/libvgpu.so\n",
    ]
    await port.start(tenant())
    assert port.prepare(tenant(), "core") == answer == unstarted.agent().prepare(tenant(), "core")
    assert answer.envs == {
        "CUDA_DEVICE_SM_LIMIT_0": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/region.cache",
        "GPU_CORE_UTILIZATION_POLICY": "force",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LIBCUDA_LOG_LEVEL": "1",
    }
    library, preload, *regions = answer.mounts
    region = str(unstarted.region)
    assert regions == [
        Mount(container_path="/usr/local/vgpu/region.cache", host_path=region),
        Mount(container_path="/tmp/cudevshr.cache", host_path=region),
    ]
    assert (library.container_path, library.read_only) == ("/usr/local/vgpu/libvgpu.so", True)
    assert (preload.container_path, preload.read_only) == ("/etc/ld.so.preload", True)
    assert mode(library.host_path) == 0o755
    assert mode(preload.host_path) == 0o644
    assert mode(region) == 0o666


@pytest.mark.hami_bug("B36, B37: limits apply to another GPU, or to the first one only")
async def test_several_gpus_are_limited_each_by_its_own_index(unstarted: Place, backend: HamiCore) -> None:
    share = gpu_share(ID, *TWO_GPUS)
    assert backend.prepare(share, "memory").envs == {"CUDA_DEVICE_MEMORY_LIMIT_0": "2048m", "CUDA_DEVICE_MEMORY_LIMIT_1": "1024m"}
    envs = backend.prepare(share, "core").envs
    assert (envs["CUDA_DEVICE_SM_LIMIT_0"], envs["CUDA_DEVICE_SM_LIMIT_1"]) == ("20", "70")
    await backend.start(share)
    region = unstarted.read()
    assert (region.limits_bytes[:3], region.core_limits_percent[:3]) == ((2 << 30, 1 << 30, 0), (20, 70, 100))
    assert await backend.observe([running(share)]) == []


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


async def test_a_library_that_does_not_answer_is_not_tried_at_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[CheckedLibrary] = []

    def refusal(library: CheckedLibrary) -> str:
        tries.append(library)
        return "it made no region within 15 s"

    monkeypatch.setattr(backend_module, "refusal", refusal)
    mine = tmp_path / "libvgpu.so"
    build(mine)
    clock = Clock()
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


async def test_the_library_side_works_on_a_seeded_region(place: Place) -> None:
    said = place.run("show", "take", "alloc", 900 << 20, "alloc", 200 << 20, "show")
    assert said[0] == f"{SEEDED}0"
    assert said[2:] == ["granted", "refused", f"{SEEDED}1"]
    assert codes(await place.observe()) == []


async def test_each_start_has_a_fresh_region(place: Place) -> None:
    first = os.stat(place.region).st_ino
    place.run("take", "use", 1 << 29, "raise", 1 << 40, 100)
    held = os.open(place.region, os.O_RDONLY)  # as the ended container's mount would: the number is not free to be used again
    await place.backend.start(tenant())
    assert os.stat(place.region).st_ino != first
    os.close(held)
    assert mode(place.region) == 0o666
    assert place.limits() == f"{SEEDED}0"
    assert codes(await place.observe()) == []


# -- tampering -------------------------------------------------------------------------------------------------------------


@pytest.mark.hami_bug("B34: a tenant removes the library or changes limits")
async def test_a_raised_limit_is_reported_and_reset_each_time(place: Place) -> None:
    for _ in range(2):
        place.run("raise", 64 << 30, 100, "priority", 0, "switch", 0)
        assert await place.observe() == []
        assert "memory=68719476736" in place.limits()  # looking changes nothing
        await place.adjust()
        assert place.limits() == f"{SEEDED}0"
        (finding,) = await place.observe()
        assert (finding.allocation, finding.code) == (ID, "tampered")
        assert finding.message.startswith(
            "team/p (main) changed its limits in HAMi-core's region: memory limit 65536 MiB instead of"
        )
        assert codes(await place.observe()) == []
    place.run("switch", 0)
    await place.adjust()
    assert codes(await place.observe()) == [], "the switch alone is set back in silence"
    assert place.limits() == f"{SEEDED}0"


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ([{"burst_bytes": size << 20} for size in (512, 100, 0, 512)], [(30, 1536), (30, 1124), (30, 1024), (30, 1536)]),
        ([{"cores": 60, "memory_bytes": 4 << 30}, {"cores": 10, "memory_bytes": 300 << 20}], [(60, 4096), (10, 300)]),
    ],
    ids=["burst", "resize"],
)
async def test_a_changed_grant_changes_the_limits_and_is_no_tampering_even_if_the_agent_ended_before_the_change(
    place: Place, changes: list[dict[str, int]], limits: list[tuple[int, int]]
) -> None:
    def in_force() -> tuple[int, int]:
        seen = place.read()
        return seen.core_limits_percent[0], seen.limits_bytes[0] >> 20

    for change, wanted in zip(changes, limits, strict=True):
        assert codes(await place.backend.observe([with_gpu(**change)])) == []
        assert await place.backend.adjust([with_gpu(**change)]) == {}
        assert in_force() == wanted
    place.run("raise", 64 << 30, CORES)
    await place.backend.adjust([with_gpu(**changes[1])])
    assert codes(await place.backend.observe([with_gpu(**changes[1])])) == ["tampered"]
    assert in_force() == limits[1]
    again = place.agent()
    await again.adjust([with_gpu(**changes[0])])
    assert codes(await again.observe([with_gpu(**changes[0])])) == [], "the former process saved this, and did not write it"
    assert in_force() == limits[0]
    await again.close()


async def test_a_limit_that_can_not_be_written_is_not_in_force(place: Place, backend: HamiCore) -> None:
    unordered = gpu_share(ID, *(replace(gpu, bus_id=None) for gpu in TWO_GPUS))
    assert "does not show the PCI bus id" in (await backend.adjust([running(unordered)]))[ID]
    assert await place.adjust() == {}


async def test_a_file_that_grows_is_cut_and_its_limits_are_restored(place: Place) -> None:
    place.run("grow", 1 << 20, "raise", 64 << 30, 100)
    await place.adjust()
    assert place.limits() == f"{SEEDED}0"
    assert os.stat(place.region).st_size == layout.FILE_BYTES
    findings = await place.observe()
    assert codes(findings) == ["tampered", "tampered"]
    assert "the file was 1048576 bytes longer" in findings[0].message
    place.run("grow", 1)
    assert codes(await place.observe()) == ["tampered"]
    assert os.stat(place.region).st_size == layout.FILE_BYTES


async def test_nothing_is_written_while_nothing_differs(place: Place) -> None:
    with place.process("take", "use", 4096) as pid:
        await place.adjust(pid)
        before = os.stat(place.region).st_mtime_ns
        await place.adjust(pid)
        assert os.stat(place.region).st_mtime_ns == before


@pytest.mark.parametrize("spoil", [("count", -7), ("count", 1 << 30), ("version", 1, 1), ("magic", 0)])
async def test_a_corrupt_region_is_reported_once_and_its_limits_are_kept(place: Place, spoil: tuple[object, ...]) -> None:
    place.run("raise", 64 << 30, 100, *spoil)
    await place.adjust()
    assert codes(await place.observe()) == ["tampered", "tampered"]
    assert f"memory={MEMORY_BYTES} cores={CORES}" in place.limits()
    assert codes(await place.observe()) == []


@pytest.mark.parametrize("spoil", [("truncate", 0), ("truncate", 5000), ("symlink", "/etc/passwd"), ("fifo",)])
async def test_a_lost_region_is_reported_once_and_not_written(place: Place, spoil: tuple[object, ...]) -> None:
    place.run(*spoil)
    there = os.lstat(place.region)
    (finding,) = await place.observe(gpu_pids=[1])
    assert finding.code == "broken"
    assert "restart the container" in finding.message
    for _ in range(4):
        assert (await place.adjust()).keys() == {ID}
        assert codes(await place.observe(gpu_pids=[1])) == []
    assert (os.lstat(place.region).st_ino, os.lstat(place.region).st_size) == (there.st_ino, there.st_size)
    await place.backend.start(tenant())
    assert place.limits() == f"{SEEDED}0"
    assert codes(await place.observe()) == []


@pytest.mark.parametrize("spoil", [("truncate", 100), ("fifo",), ("count", 2147483647)])
async def test_a_spoilt_region_leaves_the_limits_of_other_containers(place: Place, spoil: tuple[object, ...]) -> None:
    other = running(tenant("b" * 16))
    await place.backend.start(other.tenant)
    region = region_of(place.folder, "b" * 16)
    place.run(*spoil)
    place.client.run(region, "raise", 64 << 30, 100)
    await place.backend.adjust([running(), other])
    assert place.client.run(region, "show") == [f"{SEEDED}0"]
    found = [finding.code for finding in await place.backend.observe([running(), other]) if finding.allocation == "b" * 16]
    assert found == ["tampered"]


# -- processes -------------------------------------------------------------------------------------------------------------


async def test_a_process_gets_its_host_number(place: Place) -> None:
    with place.process("take") as unknown, place.process("take", "host", 4_000_000) as strange:
        await place.adjust(unknown, strange)
        assert [(slot.pid, slot.hostpid) for slot in place.read().slots] == [(unknown, unknown), (strange, strange)]
        assert codes(await place.observe(unknown, strange, gpu_pids=[unknown, strange])) == []


async def test_a_process_without_a_slot_is_reported_once_after_three_checks(place: Place) -> None:
    with place.process("take") as known, place.process("show") as past:
        now = running(pids=[known, past], gpu_pids=[known, past])
        found = [await place.backend.observe([now]) for _ in range(5)]
        assert [codes(each) for each in found] == [[], [], ["unregistered"], [], []]
        assert f"in process {past}:" in found[2][0].message
        await place.backend.observe([running(pids=[known])])  # it released its context
        assert [codes(await place.backend.observe([now])) for _ in range(3)] == [[], [], ["unregistered"]]


async def test_a_process_is_identified_by_its_host_pid_alone(place: Place) -> None:
    gone = 4_000_000_000 >> 1  # above every host pid: its pid in the container is unknown
    place.run("take", "host", gone)
    assert [codes(await place.observe(gpu_pids=[gone])) for _ in range(3)] == [[], [], []]


async def test_the_lock_of_a_killed_writer_is_ended_after_two_seconds(place: Place) -> None:
    with place.process("take", "lock") as killed, place.process("take", "lock") as slow:
        await place.adjust(killed, slow)
        os.kill(killed, signal.SIGKILL)
        await place.adjust(slow)
        place.clock.now += 1.9
        await place.adjust(slow)
        assert [(slot.pid, slot.stuck) for slot in place.read().slots] == [(killed, True), (slow, True)]
        place.clock.now += 0.2
        await place.adjust(slow)
        assert [(slot.pid, slot.stuck) for slot in place.read().slots] == [(killed, False), (slow, True)]


@pytest.mark.parametrize("spoil", [("host", 0), ("host", 0, "search"), ("host", 4_000_000, "lock")])
async def test_a_container_that_writes_its_host_pid_all_the_time_is_reported_once(
    place: Place, spoil: tuple[object, ...]
) -> None:
    """Also while it writes that the library looks for the pid, or that its slot is being written."""
    with place.process("take", *spoil) as pid:
        now, spoilt, found = running(pids=[pid]), content(place.region), list[Finding]()
        for checks in range(1, CHECKS_WRONG_HOST + 5):
            await asyncio.to_thread(place.region.write_bytes, spoilt)
            await place.backend.adjust([now])
            found += await place.backend.observe([now])
            assert (codes(found) == ["tampered"]) is (checks >= CHECKS_WRONG_HOST)
        assert f"host pid {spoil[1]} of process {pid} instead of {pid} at {CHECKS_WRONG_HOST} checks" in found[0].message
        assert [(slot.pid, slot.hostpid) for slot in place.read().slots] == [(pid, pid)]


async def test_processes_wait_five_seconds_for_one_that_was_killed_in_its_start(place: Place) -> None:
    with place.process("take", "search") as killed, place.client.waiting(place.region, "take") as waiter:
        place.until_one_waits()
        now = running(pids=[killed, waiter.pid])
        await place.backend.adjust([now])
        place.clock.now += 6
        await place.backend.adjust([now])  # the holder runs: two processes have no host pid, one of them waits
        assert place.read().postinit == 0
        os.kill(killed, signal.SIGKILL)
        now = running(pids=[waiter.pid])
        await place.backend.adjust([now])
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == f"slot 1 process {waiter.pid}\n"
    (finding,) = await place.backend.observe([now])
    assert (finding.code, "was killed while HAMi-core started in it" in finding.message) == ("broken", True)
    assert place.read().postinit == 1


async def test_a_semaphore_that_changes_hands_is_left_alone_and_none_is_kept_for_ever(place: Place) -> None:
    with place.process("take", "search") as first:
        await place.adjust(first)
        place.clock.now += 29
        with place.client.waiting(place.region, "take") as second:
            place.until_one_waits()
            now = running(pids=[first, second.pid])
            for seconds in (0, 29):
                place.clock.now += seconds
                await place.backend.adjust([now])
                assert place.read().postinit == 0
            place.clock.now += 2
            await place.backend.adjust([now])
            assert second.wait(timeout=60) == 0


# -- lives of the agent ----------------------------------------------------------------------------------------------------


async def test_a_restarted_agent_takes_over_regions(place: Place) -> None:
    await place.backend.close()
    inode = os.stat(place.region).st_ino
    place.run("raise", 64 << 30, 100)
    again = place.agent()
    not_started = tenant("ffffffffffffffff")
    await again.recover([tenant(), not_started])
    assert set(again.remains()) == {ID}
    await again.adjust([running()])
    assert codes(await again.observe([running()])) == []
    assert (place.limits(), os.stat(place.region).st_ino) == (f"{SEEDED}0", inode)
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


async def test_starts_and_checks_leave_no_open_files(place: Place) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await place.backend.start(tenant())
        await place.observe()
    assert len(os.listdir("/proc/self/fd")) == before
    await place.backend.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert stat.S_ISREG(os.stat(place.region).st_mode)  # the container goes on


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
