"""The driver's limits on containers' cgroups, with the simulated NVML behind the real monitor."""

import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import structlog.testing
from msgspec.structs import replace

from gpumgr.agent.ports import RunningContainer
from gpumgr.common.errors import Refusal
from gpumgr.driver.driver import Nvml
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.node_use import Container
from gpumgr.placement.devices import MemoryLimit
from gpumgr.sim.control import SimControl
from gpumgr.sim.library import SimNode, prepare
from tests.component.driver.new_driver import NEW_NODE, lay_out_cgroups
from tests.shares import UUID, gpu_share, shared_gpu

GIB = 1024**3
GET, SET = "nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"
GRANTED = MemoryLimit(soft_bytes=0, hard_bytes=2 * GIB)


class DriverNode:
    """A node with the new driver, one tenant on its GPU 1, and the backend under test."""

    def __init__(self, sim: SimNode, nvml: Nvml, cgroups: Path) -> None:
        self.control: SimControl = sim.control
        self.nvml, self.cgroups = nvml, cgroups
        self.seconds = 0.0
        self.runtime: str | None = None
        self.backend = self.begin()
        self.uuids = [sim.description.uuid_of(index) for index in range(2)]
        self.tenant = gpu_share("a1", shared_gpu(self.uuids[1], memory_bytes=2 * GIB), pod=("demo", "one"))
        self.container = Container(id="c1", pod=("demo", "one"), pod_uid="u1", name="main", pid=7, cgroup="/kubepods/container")

    def begin(self) -> DriverMemory:
        """A restarted agent."""
        self.backend = DriverMemory(
            self.nvml,
            cgroup_root=self.cgroups,
            runtime_obstacle=lambda: self.runtime,
            clock=lambda: self.seconds,
        )
        return self.backend

    @property
    def running(self) -> list[RunningContainer]:
        return [RunningContainer(tenant=self.tenant, container=self.container)]

    @property
    def cgroup(self) -> Path:
        return self.cgroups / "kubepods/container"

    @property
    def limit(self) -> MemoryLimit | None:
        return self.control.memory_limits(1).get(str(self.cgroup))

    def limits(self, gpu: int) -> dict[str, MemoryLimit]:
        """Cgroup -> limit, for cgroups that still exist."""
        return {cgroup: limit for cgroup, limit in self.control.memory_limits(gpu).items() if Path(cgroup).exists()}

    async def findings(self) -> list[str]:
        found = await self.backend.observe(self.running)
        assert {(finding.allocation, finding.code) for finding in found} <= {("a1", "broken")}
        return [finding.message for finding in found]


class Kept:
    """A driver that keeps the previous limit while more than the new one is in use."""

    def __init__(self, used_bytes: int = 0) -> None:
        self.limit, self.used_bytes = MemoryLimit(), used_bytes

    async def gpu_with_memory_limits(self) -> str:
        return UUID

    async def set_memory_limit(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:  # noqa: ARG002
        if hard_bytes is None or hard_bytes >= self.used_bytes:
            self.limit = MemoryLimit(soft_bytes=soft_bytes, hard_bytes=hard_bytes)

    async def memory_limit(self, uuid: str, cgroup: str) -> MemoryLimit:  # noqa: ARG002
        return self.limit


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[DriverNode]:
    (tmp_path / "new.yaml").write_text(NEW_NODE)
    sim = prepare(str(tmp_path / "new.yaml"), tmp_path / "node")
    cgroups = lay_out_cgroups(tmp_path / "cgroup")
    nvml = Nvml(library_path=sim.library_path, cgroup_root=cgroups)
    await nvml.open()
    yield DriverNode(sim, nvml, cgroups)
    sim.control.clear()
    await nvml.close()


# -- what the node needs -----------------------------------------------------------------------------------------------------


async def test_a_node_that_can_carry_it(world: DriverNode) -> None:
    backend: Backend = world.backend
    assert backend.name == "nvml-memory"
    assert backend.limits == {"memory": "hard"}
    assert await backend.unavailable() is None
    assert backend.prepare(world.tenant, "memory") == ContainerResponse()
    await backend.start(world.tenant)


async def test_everything_that_is_missing_is_said_at_once(world: DriverNode) -> None:
    (world.cgroups / "cgroup.controllers").write_text("cpu memory\n")
    world.control.set_mig(0, enabled=True)
    world.control.set_mig(1, enabled=True)
    told = await world.backend.unavailable() or ""
    assert "no dmem controller" in told
    assert "Linux 6.14 or newer" in told
    assert "nvidia-smi -mig 0" in told


async def test_a_limit_is_tried_once_until_the_driver_restarts(world: DriverNode) -> None:
    assert await world.backend.unavailable() is None
    ((cgroup, limit),) = world.control.memory_limits(0).items()
    assert (Path(cgroup).parent, limit) == (world.cgroups, MemoryLimit(soft_bytes=0, hard_bytes=GIB))
    assert list(world.cgroups.glob("gpumgr-*")) == []
    assert "dmem" in (world.cgroups / "cgroup.subtree_control").read_text()
    world.control.set_result(SET, 4)
    assert await world.backend.unavailable() is None
    world.backend.driver_restarted()
    assert await world.backend.unavailable() is not None


async def test_the_cgroup_of_a_try_that_was_killed_is_used_again_and_removed(world: DriverNode) -> None:
    (world.cgroups / "gpumgr-trial").mkdir()
    assert await world.backend.unavailable() is None
    assert not [*world.cgroups.glob("gpumgr-*")]


async def test_a_limit_that_the_driver_does_not_set_is_an_obstacle_until_it_does(world: DriverNode) -> None:
    world.control.set_result(SET, 4)
    said = await world.backend.unavailable() or ""
    assert said.startswith(f"a limit on a new cgroup below {world.cgroups} fails: {SET} of {world.uuids[0]}: ")
    assert "take RmMemacctMode out of its module options" in said
    with pytest.raises(Refusal, match="a limit on a new cgroup below"):
        await world.backend.start(world.tenant)
    assert list(world.cgroups.glob("gpumgr-*")) == []
    world.control.set_result(SET, 0)
    assert await world.backend.unavailable() is None


async def test_a_driver_that_accepts_a_limit_and_has_none_is_an_obstacle(tmp_path: Path) -> None:
    backend = DriverMemory(Kept(1 << 60), cgroup_root=lay_out_cgroups(tmp_path / "cgroup"))
    said = await backend.unavailable() or ""
    assert "fails: the driver accepted it and reports no limit; gpumgr must be able to write there" in said


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        (lambda world: (world.cgroups / "cgroup.controllers").unlink(), "cgroup v2 is not mounted"),
        (
            lambda world: (world.cgroups / "cgroup.subtree_control").unlink(),
            r"No such file or directory.*in a pod: mount it writable",
        ),
        (
            lambda world: setattr(world, "runtime", "no answer from /run/containerd/containerd.sock"),
            "the cgroups of containers can't be found: no answer from /run/containerd/containerd.sock$",
        ),
        (lambda world: world.control.unload_driver(), "driver is not loaded"),
    ],
)
async def test_a_container_does_not_start_while_something_is_missing(
    world: DriverNode, lack: Callable[[DriverNode], None], said: str
) -> None:
    lack(world)
    assert re.search(said, await world.backend.unavailable() or "")
    with pytest.raises(Refusal, match=rf"demo/one \(main\) can't start with the backend nvml-memory: .*{said}"):
        await world.backend.start(world.tenant)


# -- a container's life ------------------------------------------------------------------------------------------------------


async def test_the_limit_comes_with_the_container_and_is_a_hard_one_alone(world: DriverNode) -> None:
    await world.backend.start(world.tenant)
    await world.backend.adjust(world.running)
    assert world.limits(1) == {str(world.cgroup): GRANTED}
    assert world.limits(0) == {}
    assert await world.findings() == []
    await world.backend.adjust([])
    assert world.limit == GRANTED, "it ends with the cgroup, and processes that still run there stay limited"


async def test_bursts_and_resizes_change_the_limit_at_once(world: DriverNode) -> None:
    (gpu,) = world.tenant.gpus
    await world.backend.start(world.tenant)
    for base, more in ((2 * GIB, GIB), (2 * GIB, GIB // 2), (2 * GIB, 0), (3 * GIB, 0), (GIB, 0)):
        now = replace(gpu, memory_bytes=base, burst_bytes=more)
        world.tenant = replace(world.tenant, gpus=(now,))
        assert await world.backend.adjust(world.running) == {}
        assert world.limit == MemoryLimit(soft_bytes=0, hard_bytes=base + more)
    assert await world.findings() == []


async def test_a_burst_that_has_just_taken_more_keeps_its_limit_until_the_next_call(world: DriverNode) -> None:
    driver = Kept()
    world.backend = DriverMemory(driver, cgroup_root=world.cgroups)
    (gpu,) = world.tenant.gpus

    async def allow(burst_bytes: int) -> tuple[int | None, Mapping[str, str]]:
        world.tenant = replace(world.tenant, gpus=(replace(gpu, burst_bytes=burst_bytes),))
        obstacles = await world.backend.adjust(world.running)
        assert await world.findings() == []
        return driver.limit.hard_bytes, obstacles

    assert await allow(GIB) == (3 * GIB, {})
    driver.used_bytes = 3 * GIB - 1
    for _ in range(2):
        assert await allow(GIB // 2) == (3 * GIB, {"a1": "the driver accepted it and reports 0/3072 MiB (soft/hard)"})
    assert await allow(GIB) == (3 * GIB, {})
    driver.used_bytes = 2 * GIB
    assert await allow(GIB // 2) == (2 * GIB + GIB // 2, {})
    assert await allow(0) == (2 * GIB, {})


async def test_each_gpu_of_a_container_has_its_own_limit(world: DriverNode) -> None:
    (second,) = world.tenant.gpus
    first = shared_gpu(world.uuids[0], memory_bytes=GIB)
    world.tenant = replace(world.tenant, gpus=(first, second))
    await world.backend.adjust(world.running)
    assert world.limits(0) == {str(world.cgroup): MemoryLimit(soft_bytes=0, hard_bytes=GIB)}
    assert world.limit == GRANTED


async def test_each_container_of_a_claim_has_the_limit(world: DriverNode) -> None:
    cgroup = world.cgroups / "kubepods/second"
    cgroup.mkdir()
    (cgroup / "dmem.max").touch()
    second = replace(world.container, id="c2", pod=("demo", "two"), pod_uid="u2", cgroup="/kubepods/second")
    (first,) = world.running
    await world.backend.adjust([replace(first, others=(second,))])
    assert world.limits(1) == {str(world.cgroup): GRANTED, str(cgroup): GRANTED}
    assert await world.backend.observe([replace(first, others=(replace(second, cgroup=None),))]) == []
    await world.backend.adjust([replace(first, others=(replace(second, id="c3", cgroup=None),))])
    (finding,) = await world.backend.observe([replace(first, others=(replace(second, id="c3", cgroup=None),))])
    assert "its cgroup is not known" in finding.message


async def test_a_changed_limit_is_set_again_at_the_next_check(world: DriverNode) -> None:
    world.control.set_memory_limit(1, str(world.cgroup), MemoryLimit(soft_bytes=2 * GIB, hard_bytes=2 * GIB))
    await world.backend.adjust(world.running)
    assert world.limit == GRANTED, "a guarantee, of an earlier version, say, would be kept by the ancestors of the cgroup"
    other = MemoryLimit(soft_bytes=0, hard_bytes=9 * GIB)
    world.control.set_memory_limit(1, str(world.cgroup), other)
    await world.backend.adjust(world.running)
    assert world.limit == other  # not every second: a look costs a call of the driver
    world.seconds += 10
    await world.backend.adjust(world.running)
    assert world.limit == GRANTED


async def test_a_restarted_agent_takes_over_existing_limits(world: DriverNode) -> None:
    await world.backend.adjust(world.running)
    world.begin()
    world.control.set_result(SET, 999)
    await world.backend.adjust(world.running)
    assert await world.findings() == []


async def test_a_container_that_ends_takes_no_call_of_the_driver(world: DriverNode) -> None:
    await world.backend.adjust(world.running)
    shutil.rmtree(world.cgroup)
    world.control.set_result(SET, 999)
    world.control.set_result(GET, 999)
    with structlog.testing.capture_logs() as logs:
        await world.backend.adjust([])
    assert logs == []


# -- what goes wrong ---------------------------------------------------------------------------------------------------------


async def test_a_limit_that_the_driver_refuses_is_a_finding_until_it_stands(world: DriverNode) -> None:
    world.control.set_result(SET, 4, gpu=1)
    obstacles = await world.backend.adjust(world.running)
    assert f"{SET} of {world.uuids[1]}: " in obstacles["a1"]
    (message,) = await world.findings()
    assert message.startswith(f"the GPU memory of demo/one (main) can't be limited to 2048 MiB: {SET} of {world.uuids[1]}: ")
    assert "retried with each sample" in message
    world.control.set_result(SET, 0, gpu=1)
    assert await world.backend.adjust(world.running) == {}
    assert await world.findings() == []
    assert world.limit == GRANTED


async def test_a_limit_that_the_kernel_drops_in_silence_is_a_finding(world: DriverNode) -> None:
    world.backend = DriverMemory(Kept(1 << 60))
    await world.backend.adjust(world.running)
    (message,) = await world.findings()
    assert "the driver accepted it and reports no limit; the container may use more already" in message


async def test_a_container_with_an_unknown_cgroup_is_a_finding(world: DriverNode) -> None:
    known, unknown = world.container, replace(world.container, cgroup=None)
    world.container = unknown
    assert await world.findings() == []
    for _ in range(2):
        world.container = unknown
        await world.backend.adjust(world.running)
        (message,) = await world.findings()
        assert "its cgroup is not known" in message
        world.container = known
        await world.backend.adjust(world.running)
        assert (await world.findings(), world.limit) == ([], GRANTED)


async def test_a_container_before_its_memory_call_gets_no_limit(world: DriverNode) -> None:
    world.tenant = replace(world.tenant, gpus=(shared_gpu(world.uuids[1], memory_bytes=0),))
    await world.backend.adjust(world.running)
    assert world.limit is None
