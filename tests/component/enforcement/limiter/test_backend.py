"""The backend with real tenants on a fake GPU: they have the pages that it made, and its arbiter runs in the test."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import InputError, Refusal
from gpumgr.enforcement.limiter.backend import Limiter
from gpumgr.enforcement.limiter.page_files import PageFiles
from gpumgr.enforcement.limiter.pages import PageLimits, decode_limits
from gpumgr.ledger.answer import ContainerResponse, Mount
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import Container as RuntimeContainer
from gpumgr.ledger.node_use import TurnUse
from tests.background import until
from tests.component.enforcement.hami_core.harness import number_in_container
from tests.component.enforcement.limiter.harness import CONTEXT_BYTES, GPU_BYTES, MIB, Node, Pages, Tenant
from tests.shares import gpu_share, shared_gpu

ID = "00112233445566ff"
#: That of the fake GPU.
UUID = "GPU-00000000-0000-0000-0000-000000000001"
GPU = shared_gpu(UUID, cores=50, memory_bytes=4096 * MIB)
SHARE = gpu_share(ID, GPU)
MOUNTED = ("limits", "use", "turn")


#: What a context takes is known.
CONTEXTS = Mock(of=AsyncMock(return_value=CONTEXT_BYTES), own_pids=tuple)


def _share(cores: int, mebibytes: int) -> GpuShare:
    return gpu_share(ID, shared_gpu(UUID, cores=cores, memory_bytes=mebibytes * MIB))


@dataclass
class Place:
    """A node with the folders of an agent. `tenants`: the processes in the container."""

    node: Node
    programs: Path
    folder: Path
    #: What the agent's clock says.
    seconds: float = 100.0
    pid_in_container_of: Callable[[int], int | None] = number_in_container
    tenants: list[Tenant] = field(default_factory=list)
    #: What `adjust` returned after the last check.
    obstacles: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = self.agent()

    def agent(self) -> Limiter:
        """Another process of the agent."""
        return Limiter(
            library_dir=self.folder / "lib",
            run_dir=self.folder / "run",
            pid_in_container_of=lambda pid: self.pid_in_container_of(pid),
            quantum_milliseconds=20,
            contexts=CONTEXTS,
            find_library=lambda name: self.programs / name,
            clock=lambda: self.seconds,
        )

    async def start(self, share: GpuShare = SHARE) -> None:
        await self.backend.start(share)

    async def restart(self, share: GpuShare = SHARE, *, contexts: Mock | None = CONTEXTS) -> None:
        """Another process of the agent takes over."""
        await self.backend.close()
        self.backend = self.agent()
        self.backend._contexts = contexts
        await self.backend.recover([share])

    @property
    def pages(self) -> Pages:
        return Pages(self.folder / "run/limiter" / ID)

    def files(self) -> closing[PageFiles]:
        return closing(PageFiles.open(self.pages.place))

    @property
    def granted(self) -> PageLimits:
        """The limits in the page."""
        (limits,) = decode_limits(self.pages.path("limits").read_bytes())
        return limits

    @contextmanager
    def tenant(self) -> Iterator[Tenant]:
        """A process of the container that has a context."""
        work = self.folder / "container"
        work.mkdir(exist_ok=True)
        if not (work / "pages").exists():
            (work / "pages").symlink_to(self.pages.place)
        tenant = self.node.started(work, clock=False)
        self.tenants.append(tenant)
        yield tenant
        self.tenants.remove(tenant)
        tenant.kill()

    async def check(
        self, share: GpuShare = SHARE, *, others: Sequence[int] = (), driver_bytes: int | None = None
    ) -> Sequence[Finding]:
        pids = sorted([tenant.pid for tenant in self.tenants] + [*others] + [os.getpid()])
        running = RunningContainer(
            tenant=share,
            container=RuntimeContainer(id="c", pod=("team", "p"), pod_uid="u", name="main"),
            pids=tuple(pids),
            gpu_pids=frozenset([tenant.pid for tenant in self.tenants] + [*others]),
            memory_bytes={GPU.name: driver_bytes},
        )
        findings = await self.backend.observe([running])
        self.obstacles = await self.backend.adjust([running])
        return findings

    def turns(self) -> TurnUse:
        return self.backend.turns()[ID, GPU.name]


@pytest.fixture
async def unstarted(node: Node, programs: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """Before the container starts."""
    made = Place(node, programs, tmp_path)
    yield made
    await made.backend.close()


@pytest.fixture
async def place(unstarted: Place) -> Place:
    await unstarted.start()
    return unstarted


@pytest.fixture
def tenant(place: Place) -> Iterator[Tenant]:
    with place.tenant() as made:
        yield made


def content(path: str | Path) -> bytes:
    return Path(path).read_bytes()


# -- what the container gets ---------------------------------------------------------------------------------------------------


async def test_the_core_call_brings_library_and_pages(unstarted: Place) -> None:
    assert unstarted.backend.prepare(SHARE, "memory") == ContainerResponse()
    answer = unstarted.backend.prepare(SHARE, "core")
    await unstarted.start()
    library, preload, *pages = answer.mounts
    assert (library.container_path, library.read_only) == ("/etc/gpumgr/libgpumgr.so", True)
    assert content(library.host_path) == content(unstarted.programs / "libgpumgr.so")
    assert (preload.container_path, preload.read_only) == ("/etc/ld.so.preload", True)
    assert content(preload.host_path) == b"/etc/gpumgr/libgpumgr.so\n"
    assert pages == [
        Mount(container_path=f"/etc/gpumgr/{name}.1", host_path=str(unstarted.pages.path(name)), read_only=name == "limits")
        for name in MOUNTED
    ]
    assert [unstarted.pages.path(name).stat().st_mode & 0o777 for name in MOUNTED] == [0o644, 0o666, 0o666]
    assert unstarted.agent().prepare(SHARE, "core") == answer


async def test_a_container_whose_agent_is_updated_before_its_start_finds_its_library(unstarted: Place) -> None:
    """Its mounts are in the answer of the former agent."""
    library, preload, *_ = unstarted.backend.prepare(SHARE, "core").mounts
    other = unstarted.folder / "libgpumgr.so"
    other.write_bytes(content(unstarted.programs / "libgpumgr.so") + b"\0")
    await unstarted.restart()
    unstarted.backend._find = lambda name: other if name == other.name else unstarted.programs / name
    await unstarted.start()
    assert unstarted.backend.prepare(SHARE, "core").mounts[0] != library
    assert content(library.host_path) == content(unstarted.programs / "libgpumgr.so")
    assert content(preload.host_path) == b"/etc/gpumgr/libgpumgr.so\n"


async def test_without_its_libraries_it_is_unavailable_and_refuses(tmp_path: Path) -> None:
    def find(name: str) -> Path:
        raise InputError(f"this installation has no {name}")

    bare = Limiter(
        library_dir=tmp_path,
        run_dir=tmp_path,
        pid_in_container_of=number_in_container,
        quantum_milliseconds=20,
        find_library=find,
    )
    assert await bare.unavailable() == "this installation has no libgpumgr.so"
    with pytest.raises(Refusal, match=r"the limiter can't limit team/p \(main\): this installation has no libgpumgr\.so"):
        bare.prepare(SHARE, "core")
    with pytest.raises(Refusal, match=r"this installation has no libgpumgr\.so"):
        await bare.start(SHARE)
    await bare.close()


async def test_gpus_that_the_pages_can_not_have_are_refused(place: Place) -> None:
    with pytest.raises(Refusal, match="can't start with the backend limiter"):
        await place.start(gpu_share(ID, replace(GPU, uuid="GPU-1")))
    gpus = [shared_gpu(f"GPU-00000000-0000-0000-0000-0000000000{n:02x}", cores=50, memory_bytes=MIB) for n in range(17)]
    with pytest.raises(Refusal, match="at most 16 GPUs in one container, and this one has 17"):
        await place.start(gpu_share(ID, *gpus))


# -- memory --------------------------------------------------------------------------------------------------------------------


async def test_the_memory_that_was_granted_is_the_limit(place: Place, tenant: Tenant) -> None:
    result, granted, _ = tenant.ask(f"grab alloc {64 * MIB} {8192 * MIB}")
    assert (result, granted) == (2, (GPU.memory_bytes - CONTEXT_BYTES) // (64 * MIB) * 64 * MIB)
    assert await place.check() == []
    assert place.turns().memory_bytes_by_kind == {"alloc": granted, "context": CONTEXT_BYTES}


async def test_what_the_driver_uses_beyond_the_count_is_taken_from_the_limit(place: Place, tenant: Tenant) -> None:
    await place.check(driver_bytes=CONTEXT_BYTES + 100 * MIB)
    free = tenant.ask("info")[1]
    assert free == GPU.memory_bytes - CONTEXT_BYTES
    await place.check(driver_bytes=CONTEXT_BYTES + 100 * MIB)
    assert tenant.ask("info")[1] == free - 100 * MIB
    await place.check(driver_bytes=None)  # not known: as before
    assert tenant.ask("info")[1] == free - 100 * MIB
    with place.files() as files:
        files.suspend()
        await place.check(driver_bytes=0)
        files.resume()
    assert tenant.ask("info")[1] == free - 100 * MIB
    await place.check(driver_bytes=CONTEXT_BYTES)
    assert tenant.ask("info")[1] == free


async def test_memory_that_was_freed_after_the_drivers_figure_is_not_taken_twice(place: Place, tenant: Tenant) -> None:
    for _ in range(2):
        await place.check(driver_bytes=CONTEXT_BYTES)
    tenant.ask(f"grab alloc {64 * MIB} {1024 * MIB}")
    tenant.ask("free")
    await place.check(driver_bytes=CONTEXT_BYTES + 1024 * MIB)
    assert tenant.ask("info")[1] == GPU.memory_bytes - CONTEXT_BYTES


async def test_memory_that_was_taken_after_the_drivers_figure_leaves_no_more_than_the_limit(place: Place, tenant: Tenant) -> None:
    """What the library does not count stays charged, and is corrected when the count rests."""
    for _ in range(2):
        await place.check(driver_bytes=CONTEXT_BYTES + 100 * MIB)
    free = tenant.ask("info")[1]
    for taken in range(4):
        tenant.ask(f"grab alloc {32 * MIB} {32 * MIB}")
        await place.check(driver_bytes=CONTEXT_BYTES + (100 + 32 * taken) * MIB)
        assert tenant.ask("info")[1] == free - 32 * (taken + 1) * MIB
    await place.check(driver_bytes=CONTEXT_BYTES + (90 + 32 * 4) * MIB)
    assert tenant.ask("info")[1] == free - (32 * 4 - 10) * MIB


async def test_the_slot_of_a_process_that_was_killed_is_freed(place: Place) -> None:
    with place.tenant() as tenant:
        assert tenant.ask(f"grab alloc {64 * MIB} {1024 * MIB}")[0] == 0
        await place.check()
        assert place.turns().memory_bytes_by_kind == {"alloc": 1024 * MIB, "context": CONTEXT_BYTES}
    for _ in range(3):
        await place.check()
    assert place.turns().memory_bytes_by_kind == {}
    with place.tenant() as tenant:
        assert tenant.ask("info")[1] == GPU.memory_bytes - CONTEXT_BYTES
        most = (GPU.memory_bytes - CONTEXT_BYTES) // (64 * MIB) * 64 * MIB
        assert tenant.ask(f"grab alloc {64 * MIB} {most}")[:2] == (0, most)


async def test_the_slot_of_a_process_that_executes_another_program_is_freed(place: Place, tenant: Tenant) -> None:
    """The exec ended its contexts, and the new program may never use CUDA."""
    assert tenant.ask(f"grab alloc {64 * MIB} {1024 * MIB}")[0] == 0
    tenant.send("sleep")
    tenant.await_program("sleep")
    for _ in range(3):
        await place.check()
    assert place.turns().memory_bytes_by_kind == {}


async def test_a_slot_that_its_process_takes_anew_after_an_exec_is_not_freed(place: Place) -> None:
    """It took the slot after the agent had read what it held before."""
    with place.tenant(), place.files() as files:
        (slot,), turn = files.slots(), place.pages.turn.gpu[0]
        assert slot.stack
        turn.word[slot.index] = 1  # it wants the turn
        files.free(replace(slot, stack=slot.stack + 1))
        assert (files.slots(), turn.word[slot.index]) == ((slot,), 1)
        files.free(slot)
        assert (files.slots(), turn.word[slot.index]) == ((), 0)


async def test_a_process_that_executes_while_the_agent_frees_its_slot_has_a_slot_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent compares and empties a slot in several steps."""
    with place.tenant() as tenant, place.files() as files:
        (slot,), write = files.slots(), files.use.write

        def execute_first(offset: int, data: bytes) -> None:
            monkeypatch.setattr(files.use, "write", write)
            tenant.send("exec")
            assert tenant.ask("init 0")[0] == 0
            write(offset, data)

        monkeypatch.setattr(files.use, "write", execute_first)
        files.free(slot)
        (left,) = files.slots()
        assert (left.pid, left.stack != slot.stack) == (slot.pid, True)


async def test_the_slot_of_a_zombie_is_freed(place: Place, tenant: Tenant) -> None:
    os.kill(tenant.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, tenant.pid, os.WEXITED | os.WNOWAIT)
    place.tenants.remove(tenant)  # the runtime does not list it
    for _ in range(3):
        await place.check()
    assert place.turns().memory_bytes_by_kind == {}
    place.tenants.append(tenant)


# -- cores -----------------------------------------------------------------------------------------------------------------------


async def test_turns_are_counted_and_outlive_their_process(place: Place) -> None:
    with place.tenant() as tenant:
        result, _, _ = tenant.ask("work products 300 1")
        assert result == 0
        await place.check()
        first = place.turns()
        assert (first.launches > 0, first.held_seconds > 0) == (True, True)
    for _ in range(3):
        await place.check()
    assert place.turns().launches == first.launches


async def test_the_time_held_is_that_of_the_last_ten_seconds(place: Place) -> None:
    await place.check()
    assert (place.turns().held_ratio, place.turns().waited_ratio) == (None, None)
    with place.tenant() as tenant:
        assert tenant.ask("work products 100 1")[0] == 0
        place.seconds += 1
        await place.check()
        held = place.turns().held_seconds
        assert place.turns().held_ratio == pytest.approx(held)
        place.seconds += 1
        await place.check()
        assert place.turns().held_ratio == pytest.approx(place.turns().held_seconds / 2)
        while place.turns().held_ratio:  # the turn may be given back later on a busy machine
            place.seconds += 1
            await place.check()
            await asyncio.sleep(0.01)


async def test_a_burst_changes_the_limit_while_the_container_runs(place: Place, tenant: Tenant) -> None:
    """Beyond what the GPU has the driver refuses, and the library passes that on as out of memory."""

    def bursting(mebibytes: int) -> GpuShare:
        return gpu_share(ID, replace(GPU, burst_bytes=mebibytes * MIB))

    grab = f"grab alloc {64 * MIB} {GPU_BYTES}"
    result, granted, _ = tenant.ask(grab)
    assert (result, await place.check(bursting(4096))) == (2, [])
    assert tenant.ask("info") == (0, 8192 * MIB - CONTEXT_BYTES - granted, 8192 * MIB)
    assert await place.check(bursting(200 << 10)) == []
    result, granted, _ = tenant.ask(grab)
    assert result == 2
    assert GPU_BYTES - 8192 * MIB < granted < GPU_BYTES
    # The limit goes below what is in use: nothing is lost, and nothing more is granted.
    assert await place.check(bursting(4096)) == []
    assert tenant.ask(grab)[:2] == (2, 0)
    assert tenant.ask("info") == (0, 0, 8192 * MIB)
    tenant.ask("free")
    assert tenant.ask("info")[1] == 8192 * MIB - CONTEXT_BYTES


@pytest.mark.parametrize(
    ("share", "limits"),
    [  # the limit of cores, the ceiling, and MiB; 0: none
        *((replace(SHARE, core_limit=limit), (50, ceiling, 4096)) for limit, ceiling in ((80, 80), (20, 50), (100, 100))),
        *((_share(cores, mebibytes), (cores, cores, mebibytes)) for cores, mebibytes in ((60, 6144), (10, 1024))),
        (_share(0, 4096), (0, 100, 4096)),
        (_share(100, 4096), (0, 100, 0)),
    ],
)
async def test_a_container_has_the_limits_of_its_share_when_it_starts_and_when_the_share_changes(
    place: Place, share: GpuShare, limits: tuple[int, int, int]
) -> None:
    for act in (place.check, place.start):
        assert not await act(share)
        page = place.granted
        assert (page.share_percent, page.ceiling_percent, page.memory_bytes >> 20) == limits
    assert await place.check(share) == []
    with place.tenant() as tenant:
        assert tenant.ask("info")[2] == (limits[2] * MIB or GPU_BYTES - 615 * MIB)


# -- findings --------------------------------------------------------------------------------------------------------------------


def _name_other_gpus(pages: Pages) -> None:
    pages.limits.gpus, pages.limits.gpu[0].uuid[0] = 2, 7


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda pages: os.truncate(pages.path("use"), 100), "bytes of the page 'use' were cut off"),
        (lambda pages: os.truncate(pages.path("use"), 1 << 23), "bytes longer"),
        (lambda pages: setattr(pages.use, "version", 7), "the head of the page 'use' was changed"),
        (lambda pages: setattr(pages.limits.gpu[0], "memory_bytes", 1 << 60), "the limit 'memory_bytes' was changed"),
        (lambda pages: setattr(pages.limits.gpu[0], "share", 100), "the limit 'share' was changed"),
        (_name_other_gpus, "the limit 'gpus' was changed, the limit 'uuid' was changed"),
    ],
)
async def test_a_page_that_was_changed_is_restored_and_reported_once(
    place: Place, spoil: Callable[[Pages], object], found: str
) -> None:
    def heads() -> list[tuple[int, bytes]]:
        contents = [content(place.pages.path(name)) for name in MOUNTED]
        return [(len(each), each[:8]) for each in contents]

    assert await place.check() == []
    before = heads()
    spoil(place.pages)
    [finding] = await place.check()
    assert (finding.code, found in finding.message) == ("tampered", True)
    assert heads() == before
    assert await place.check() == []
    with place.tenant() as tenant:
        assert tenant.ask(f"grab alloc {64 * MIB} {8192 * MIB}")[0] == 2


@pytest.mark.parametrize("size_bytes", [0, 1 << 20])
async def test_a_damaged_turn_is_restored_by_the_arbiter_and_reported(place: Place, size_bytes: int) -> None:
    assert await place.check() == []
    turn = place.pages.path("turn")
    before = turn.stat().st_size
    os.truncate(turn, size_bytes)
    while not (found := await place.check()):  # noqa: ASYNC110 (the arbiter is a thread)
        await asyncio.sleep(0)
    assert [(each.code, "the page 'turn' was damaged" in each.message) for each in found] == [("tampered", True)]
    assert turn.stat().st_size == before


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.link(path, path.with_name("other"))])
async def test_a_page_that_can_not_be_used_is_reported_once(place: Place, spoil: Callable[[Path], object]) -> None:
    spoil(place.pages.path("use"))
    [finding] = await place.check()
    assert (finding.code, "gpumgr's pages can't be used (its file" in finding.message) == ("broken", True)
    assert await place.check() == []
    assert "its file" in place.obstacles[ID]


@pytest.mark.parametrize("fill", [b"\xff", b"\x41"])
async def test_no_bytes_stop_the_agent(place: Place, fill: bytes) -> None:
    for name in ("use", "turn"):
        path = place.pages.path(name)
        path.write_bytes(fill * path.stat().st_size)
    for _ in range(4):
        assert {finding.code for finding in await place.check(driver_bytes=MIB)} <= {"tampered", "broken"}
    assert await place.check() == []


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"\xff" * path.stat().st_size)])
async def test_a_spoilt_page_leaves_the_limits_of_other_containers(place: Place, spoil: Callable[[Path], object]) -> None:
    other = replace(SHARE, allocation="b" * 16)
    await place.start(other)
    limits = Pages(place.folder / "run/limiter" / other.allocation).limits.gpu[0]
    spoil(place.pages.path("use"))
    limits.memory_bytes = 1 << 60
    container = RuntimeContainer(id="c", pod=("team", "p"), pod_uid="u", name="main")
    found = await place.backend.observe([RunningContainer(tenant=each, container=container) for each in (SHARE, other)])
    assert [finding.code for finding in found if finding.allocation == other.allocation] == ["tampered"]
    assert limits.memory_bytes == GPU.memory_bytes


async def test_a_process_without_the_library_is_reported_by_the_second_check(place: Place) -> None:
    """The agent checks once a second; a process that is missing in one check may have ended."""
    found = [await place.check(others=[os.getpid()]) for _ in range(4)]
    assert [len(each) for each in found] == [0, 1, 0, 0]
    [finding] = found[1]
    assert (finding.code, f"process {os.getpid()}" in finding.message) == ("unregistered", True)
    assert "mounted noexec" in finding.message


async def test_what_the_library_says_of_itself_is_reported_once(place: Place) -> None:
    with place.tenant():
        assert await place.check() == []
        slot = place.pages.use.slot[0]
        slot.state, slot.fault, slot.gpu[0].unknown = 2, b"no memory\x1b", 1
        found = await place.check()
        assert [finding.code for finding in found] == ["broken", "broken"]
        assert " (no memory) of " in found[0].message
        assert "newer versions of CUDA functions" in found[1].message
        assert await place.check() == []


# -- the agent's end and start ---------------------------------------------------------------------------------------------------


async def test_a_restarted_agent_takes_the_pages_over(place: Place) -> None:
    with place.tenant() as tenant:
        tenant.ask(f"grab alloc {64 * MIB} {1024 * MIB}")
        before = place.pages.path("limits").stat().st_ino
        await place.restart()
        assert await place.check() == []
        assert place.turns().memory_bytes_by_kind == {"alloc": 1024 * MIB, "context": CONTEXT_BYTES}
        assert place.pages.path("limits").stat().st_ino == before
        assert tenant.ask("work products 100 1")[0] == 0
    assert place.backend.remains() == [ID]
    await place.backend.cleanup(ID)
    assert place.backend.remains() == []


async def test_a_container_that_starts_again_gets_new_pages(place: Place) -> None:
    first = place.pages.path("use").stat().st_ino
    await place.check()
    await place.start(gpu_share(ID, replace(GPU, memory_bytes=1024 * MIB)))
    assert place.pages.path("use").stat().st_ino != first
    with place.tenant() as tenant:
        assert tenant.ask(f"grab alloc {64 * MIB} {4096 * MIB}")[1] == (1024 * MIB - CONTEXT_BYTES) // (64 * MIB) * 64 * MIB


async def test_a_restarted_agent_keeps_what_it_can_not_know_yet(place: Place, tenant: Tenant) -> None:
    """The size of a context, and what the driver uses beyond the count, are in the page."""
    for _ in range(2):
        await place.check(driver_bytes=CONTEXT_BYTES + 100 * MIB)
    before = place.granted
    await place.restart(contexts=None)
    assert await place.check(driver_bytes=CONTEXT_BYTES + 100 * MIB) == []
    assert place.granted == before
    assert tenant.ask("info")[1] == GPU.memory_bytes - CONTEXT_BYTES - 100 * MIB


OTHER = shared_gpu("GPU-00000000-0000-0000-0000-0000000000ff", cores=100, memory_bytes=1024 * MIB)


async def test_the_pages_keep_their_order_of_gpus_when_one_is_lost(place: Place) -> None:
    """GPUs are sorted by their bus ids, which a lost GPU has no longer; a program keeps the page's index of its GPU."""
    await place.start(gpu_share(ID, GPU, OTHER))
    before = decode_limits(content(place.pages.path("limits")))
    assert await place.check(gpu_share(ID, OTHER, GPU)) == []
    assert await place.check(gpu_share(ID, GPU)) == []
    assert decode_limits(content(place.pages.path("limits"))) == before
    await place.restart(gpu_share(ID, OTHER, GPU))
    assert await place.check(gpu_share(ID, OTHER, GPU)) == []
    assert decode_limits(content(place.pages.path("limits"))) == before
    assert set(place.backend.turns()) == {(ID, GPU.name), (ID, OTHER.name)}


async def test_a_slot_of_another_pid_namespace_is_not_that_of_a_process_with_the_same_pid(place: Place) -> None:
    """A container of a claim restarts with the same pages: its first process has pid 1 again."""
    with place.tenant():
        place.pages.use.slot[0].pid_namespace = 1
        for _ in range(3):
            await place.check()
        assert place.turns().memory_bytes_by_kind == {}


async def test_a_check_beside_restarts_finds_nothing_and_leaves_nothing_open(place: Place) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    async def checks() -> list[Finding]:
        return [finding for _ in range(50) for finding in await place.check()]

    found, *_ = await asyncio.gather(checks(), *(place.start() for _ in range(10)))
    assert found == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    await asyncio.gather(checks(), place.backend.cleanup(ID))
    await place.backend.cleanup(ID)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3


async def test_pages_that_could_not_be_opened_are_tried_again(place: Place) -> None:
    use = place.pages.path("use")
    hidden = use.rename(use.with_name("hidden"))
    await place.restart()
    [finding] = await place.check()
    assert (finding.code, "No such file or directory" in finding.message) == ("broken", True)
    assert "can't be opened" in place.obstacles[ID]
    assert await place.check() == []
    hidden.rename(use)
    assert (await place.check(), place.obstacles) == ([], {})
    assert place.turns().overruns == 0


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "claim"])
async def test_work_that_does_not_end_is_reported_by_the_second_check(place: Place, tenant: Tenant, *, kernel: bool) -> None:
    """A kernel overruns one turn only; a process may also claim that it has work."""
    assert await place.check() == []
    if kernel:
        tenant.send("work endless 10000 1")
    else:
        place.pages.claim_work(seconds=4)
    [number] = place.backend._monitors[ID]._numbers
    await until(lambda: place.backend._arbiter.turns(number).overruns)
    assert await place.check() == []
    [finding] = await place.check()
    assert (finding.code, "keeps GPU" in finding.message) == ("broken", True)
    assert await place.check() == []


async def test_more_processes_than_the_library_counts_are_reported(place: Place) -> None:
    place.pages.take_all_slots()
    [finding] = await place.check()
    assert (finding.code, "more processes that use CUDA" in finding.message) == ("broken", True)
    assert await place.check() == []


async def test_any_number_of_claimed_faults_is_a_few_findings(place: Place) -> None:
    use = place.pages.use
    use.slots = 1024
    for number, slot in enumerate(use.slot):
        slot.pid, slot.state = number + 1, 2
    found = [finding for _ in range(5) for finding in await place.check()]
    assert len(found) <= 3
    assert all(len(finding.message) < 1000 for finding in found)


async def test_what_a_container_holds_without_turns_is_not_known(place: Place) -> None:
    """It is not 0: a container without cores, and one that is alone with a ceiling of 100, launch without a turn."""
    neighbour, alone = gpu_share("b" * 16, GPU), replace(SHARE, core_limit=100)
    await place.start(neighbour)
    for share in (gpu_share(ID, replace(GPU, cores=0)), alone):
        await place.start(share)
        if share is alone:
            await place.backend.cleanup(neighbour.allocation)
            await until(lambda: place.pages.limits.gpu[0].passes)  # the arbiter's word
        for _ in range(3):
            place.seconds += 1
            await place.check(share)
        assert (place.turns().held_ratio, place.turns().waited_ratio) == (None, None)


async def test_the_event_loop_does_not_wait_for_a_check(place: Place) -> None:
    """A container can make a check slow: it writes its page."""
    began, ends = threading.Event(), threading.Event()

    def slow(pid: int) -> int | None:
        began.set()
        ends.wait()
        return number_in_container(pid)

    place.pid_in_container_of = slow
    check = asyncio.create_task(place.check())
    await asyncio.to_thread(began.wait)
    answers = list[bool]()

    def read() -> None:
        answers.append(place.backend.hold_calls(ID, hold=True))
        answers.append(place.backend.asks_for_resume(ID))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    await asyncio.to_thread(reader.join, 10.0)
    seen = [*answers]
    ends.set()
    await check
    assert seen == [True, False]
