"""Which process belongs to which container, with a runtime on a real socket that comes and goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import CriError
from gpumgr.ledger.node_use import Container
from gpumgr.runtime.containers import UNKNOWN_PERIOD_SECONDS, Containers
from gpumgr.runtime.cri import CriClient
from tests.component.runtime.cri.node import UID, Node, Runtime, container_id, serving
from tests.cri_api import cri

POD = f"/kubepods/burstable/pod{UID}"


class Stage:
    """A node, its runtime, and what is tested. `now` is the time that `containers` sees; it passes at once."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.node = Node(folder, "hybrid")
        self.runtime = Runtime()
        self.now = 1000.0
        self._socket = socket
        self._server = AsyncExitStack()
        self._client = CriClient(socket, timeout_seconds=30)
        self.containers = Containers(self._client, self.node.cgroups, self.node.runs, clock=lambda: self.now, sleep=self._pass)

    async def _pass(self, seconds: float) -> None:
        self.now += seconds

    async def up(self) -> None:
        await self._server.enter_async_context(serving(self.runtime, self._socket))

    async def down(self) -> None:
        await self._server.aclose()

    async def close(self) -> None:
        self._client.close()
        await self.down()

    def hang(self) -> None:
        """The runtime no longer answers, and calls time out soon."""
        self.runtime.hold, self._client._timeout_seconds = asyncio.Event(), 0.2

    def start(self, number: int, *, cgroup: str | None = None) -> str:
        """A container with one process, with pid 100 times `number`."""
        name = container_id(number)
        self.node.process(number * 100, cgroup or f"{POD}/{name}")
        return self.runtime.container(number, f"{POD}/{name}", pid=number * 100)

    async def of(self, pid: int) -> Container | None:
        return await self.containers.container_of(pid, pid * 10)

    async def ticks(self, seconds: int) -> int:
        """Ticks once a second; how often the runtime was asked."""
        before = self.runtime.lists
        for _ in range(seconds):
            await self.containers.tick()
            self.now += 1
        return self.runtime.lists - before


@pytest.fixture
async def stage(tmp_path: Path, socket: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path, socket)
    await made.up()
    yield made
    await made.close()


def expected(number: int) -> Container:
    return Container(
        id=container_id(number),
        pod=("demo", "resnet"),
        pod_uid=UID,
        name=f"c{number}",
        running=True,
        pid=number * 100,
        cgroup=f"{POD}/{container_id(number)}",
        created_at=1_700_000_000.5,
    )


async def test_a_process_belongs_to_its_container(stage: Stage) -> None:
    stage.start(1)
    stage.start(2)
    stage.node.process(777, f"{POD}/{container_id(2)}/docker/{container_id(99)}")
    stage.node.process(888, "/system.slice/sshd.service")
    assert await stage.of(100) == expected(1)
    assert await stage.of(777) == expected(2)
    assert await stage.of(888) is None
    assert await stage.of(4711) is None
    assert stage.runtime.lists == 1
    assert await stage.containers.container_of(100, 4) is None, "its number was used again"


async def test_running_containers_and_their_processes_are_listed(stage: Stage) -> None:
    stage.start(1)
    stage.runtime.container(2, state=cri.CONTAINER_CREATED)
    stage.runtime.container(3, state=cri.CONTAINER_EXITED)
    stage.node.process(20, f"{POD}/{container_id(1)}/below")
    await stage.containers.refresh()
    assert stage.containers.running() == (expected(1),)
    assert stage.containers.pids(expected(1)) == (20, 100)


async def test_the_status_of_each_running_container_is_read_once(stage: Stage) -> None:
    names = [stage.start(1), stage.start(2)]
    stage.runtime.container(3, state=cri.CONTAINER_CREATED)
    await stage.containers.refresh()
    await stage.containers.refresh()
    assert stage.runtime.asked == names
    stage.runtime.remove(container_id(3))
    stage.start(3)
    await stage.containers.refresh()
    await stage.containers.refresh()
    assert stage.runtime.asked == [*names, container_id(3)]
    assert stage.runtime.verbose


async def test_what_is_gone_is_dropped(stage: Stage) -> None:
    name = stage.start(1)
    stage.start(2)
    assert await stage.of(100) is not None
    stage.runtime.remove(name)
    await stage.containers.refresh()
    assert stage.containers.running() == (expected(2),)
    assert await stage.of(100) is None
    stage.node.end(200)
    assert await stage.of(200) is None


async def test_an_ended_container_keeps_its_cgroup_and_loses_its_process(stage: Stage) -> None:
    stage.start(1)
    await stage.containers.refresh()
    stage.runtime.listed.containers[0].state = cri.CONTAINER_EXITED
    await stage.containers.refresh()
    ended = await stage.of(100)
    assert ended is not None
    assert (ended.running, ended.pid, ended.cgroup) == (False, None, expected(1).cgroup)
    assert stage.containers.running() == ()


async def test_the_cgroup_comes_from_the_kernel(stage: Stage) -> None:
    mixed = (
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID.replace('-', '_')}.slice:cri-containerd:{container_id(1)}"
    )
    stage.start(1, cgroup=mixed)
    found = await stage.of(100)
    assert found is not None
    assert found.cgroup == mixed
    assert stage.containers.pids(found) == (100,)


async def test_without_the_first_process_the_cgroup_comes_from_the_runtime(stage: Stage) -> None:
    slices = f"kubepods-pod{UID.replace('-', '_')}.slice"
    stage.runtime.container(1, f"{slices}:cri-containerd:{container_id(1)}", pid=4711)  # the systemd driver's is no path
    stage.node.process(4712, f"{POD}/{container_id(5)}")
    stage.runtime.container(2, f"{POD}/{container_id(2)}", pid=4712)  # a number used again: the process is another container's
    stage.runtime.container(3)
    await stage.containers.refresh()
    one, two, three = stage.containers.running()
    assert (one.cgroup, two.cgroup, three.cgroup) == (None, f"{POD}/{container_id(2)}", None)
    assert one.pid is None, "it may be another container's"
    assert stage.containers.pids(three) == ()
    stage.node.process(4711, f"/kubepods.slice/{slices}/cri-containerd-{container_id(1)}.scope")
    await stage.containers.refresh()
    one, *_ = stage.containers.running()
    assert one.cgroup == f"/kubepods.slice/{slices}/cri-containerd-{container_id(1)}.scope", "it is asked for again"


async def test_an_unknown_container_is_looked_up_once(stage: Stage) -> None:
    stage.node.process(500, f"{POD}/{container_id(5)}")  # a sandbox: the runtime does not list it
    stage.node.process(501, f"{POD}/{container_id(5)}")
    assert [await stage.of(pid) for pid in (500, 501, 500)] == [None, None, None]
    assert stage.runtime.lists == 1
    stage.start(1)
    assert await stage.of(100) == expected(1)
    assert stage.runtime.lists == 2


async def test_unknown_containers_are_looked_up_with_a_short_pause_between(stage: Stage) -> None:
    for number in (1, 2, 3):
        stage.node.process(number, f"{POD}/{container_id(number)}")
    await stage.of(1)
    assert (stage.runtime.lists, stage.now) == (1, 1000)
    stage.now += UNKNOWN_PERIOD_SECONDS / 4
    await stage.of(2)
    assert (stage.runtime.lists, stage.now) == (2, 1000 + UNKNOWN_PERIOD_SECONDS)
    stage.now += 5
    await stage.of(3)
    assert (stage.runtime.lists, stage.now) == (3, 1005 + UNKNOWN_PERIOD_SECONDS)
    assert UNKNOWN_PERIOD_SECONDS < 0.05, "a program of the backend vcuda waits for the answer in its first call"


async def test_concurrent_lookups_share_one_call(stage: Stage) -> None:
    for number in (1, 2, 3):
        stage.start(number)
    stage.runtime.hold = asyncio.Event()
    asking = [asyncio.create_task(stage.of(number * 100)) for number in (1, 2, 3, 1)]
    await stage.runtime.began.wait()
    stage.now += 0.001
    stage.runtime.hold.set()
    assert await asyncio.gather(*asking) == [expected(1), expected(2), expected(3), expected(1)]
    assert stage.runtime.lists == 1


async def test_a_container_listed_late_is_found_all_the_same(stage: Stage) -> None:
    stage.node.process(100, f"{POD}/{container_id(1)}")
    assert await stage.of(100) is None
    stage.start(1)
    await stage.containers.refresh()
    assert await stage.of(100) == expected(1)


async def test_the_poll_interval_is_short_after_a_change_and_long_otherwise(stage: Stage) -> None:
    assert await stage.ticks(31) == 4
    stage.containers.wake()
    assert await stage.ticks(15) == 15
    assert await stage.ticks(30) == 3
    stage.start(1)
    assert await stage.ticks(10) == 1
    assert await stage.ticks(10) >= 9
    assert await stage.ticks(60) < 30
    stage.containers.wake()
    assert await stage.ticks(10) == 10
    stage.containers.wake()
    assert await stage.ticks(25) == 16, "a second wake starts the frequent polls again"


async def test_the_runtime_is_polled_once_a_second_at_most(stage: Stage) -> None:
    stage.containers.wake()
    assert await stage.ticks(1) == 1
    stage.now -= 0.1
    assert await stage.ticks(1) == 0
    assert await stage.ticks(1) == 1


async def test_an_outage_is_reported_once_and_containers_are_kept(stage: Stage) -> None:
    stage.start(1)
    await stage.containers.refresh()
    await stage.down()
    stage.start(2)
    with structlog.testing.capture_logs() as logs:
        await stage.containers.refresh()
        await stage.containers.refresh()
        assert await stage.of(100) == expected(1)
        assert stage.containers.running() == (expected(1),)
        assert stage.containers.pids(expected(1)) == (100,)
        with pytest.raises(CriError, match=r"cri\.socket"):
            await stage.of(200)
        assert stage.containers.unavailable is not None
        await stage.up()
        await stage.containers.tick()  # asking for the unknown one has woken it
        stage.now += 1
        await stage.containers.tick()
        await stage.containers.refresh()
    assert await stage.of(200) == expected(2)
    assert stage.containers.unavailable is None
    assert [log["event"] for log in logs] == ["cri_unavailable", "cri_available"]
    assert "cri.socket" in logs[0]["reason"]


async def test_a_runtime_that_hangs_is_asked_once(stage: Stage) -> None:
    stage.start(1)
    stage.hang()
    for _ in range(2):
        with pytest.raises(CriError, match="no answer"):
            await stage.of(100)
    assert stage.runtime.lists == 1


async def test_one_bad_container_does_not_affect_others(stage: Stage) -> None:
    ending = stage.runtime.container(3)  # during its lookup, which is no error
    del stage.runtime.statuses[ending]
    bad = stage.start(1)
    stage.runtime.failures[bad] = GRPCError(Status.UNKNOWN, "failed to get container runtime spec")
    stage.start(2)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await stage.containers.refresh()
    three, one, two = stage.containers.running()
    assert (three.name, three.pid) == ("c3", None)
    assert (one.name, one.pid, one.cgroup) == ("c1", None, None)
    assert two == expected(2)
    assert [(log["event"], log["container"]) for log in logs] == [("container_not_located", bad)]
    assert stage.containers.unavailable is None
    del stage.runtime.failures[bad]
    await stage.containers.refresh()
    await stage.containers.refresh()
    assert stage.runtime.asked.count(bad) == 4


@pytest.mark.parametrize(
    "parent", ["/system.slice/cri-containerd-{id}.scope", "/k8s.io/{id}", "/pods.slice/a-{id}.scope", "/anywhere"]
)
async def test_a_process_belongs_to_the_container_that_has_its_cgroup(stage: Stage, parent: str) -> None:
    """Without cgroupsPerQOS the kubelet names no parent, and the runtime chooses the place."""
    name = container_id(1)
    cgroup = parent.format(id=name)
    stage.node.process(100, f"{cgroup}/init.scope")
    stage.node.process(101, f"{cgroup}/a/{container_id(9)}")
    stage.node.process(102, f"{cgroup}x")
    stage.runtime.container(1, cgroup, pid=100)
    if not parent.startswith("/k8s.io"):  # else the process shows that there is one, which is polled for
        await stage.containers.refresh()
    for pid in (100, 101):
        found = await stage.of(pid)
        assert found is not None
        assert (found.id, found.cgroup) == (name, cgroup)
    assert await stage.of(102) is None
    (container,) = stage.containers.running()
    assert stage.containers.pids(container) == (100, 101)
