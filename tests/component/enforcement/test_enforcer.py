"""The mechanisms as one: what is answered, put on disk, and removed."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import GpumgrError, Refusal
from gpumgr.common.units import RESOURCES, Resource
from gpumgr.enforcement import cdi
from gpumgr.enforcement.backend import Backend, BackendName, Unlimited
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.ledger.answer import ContainerResponse, Mount
from gpumgr.ledger.gpu_share import EnforcementTerms, GpuShare, Strength
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import Container
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView
from gpumgr.settings.schema import EnforcementSettings
from tests.component.stage.stage import Clock
from tests.shares import gpu_share

ID = "00112233445566ff"
BASE = ContainerResponse(
    envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"},
    mounts=(Mount(container_path="/etc/vcuda", host_path=f"/vm/{ID}", read_only=True),),
    annotations={"tencent.com/vcuda-core": "30"},
)


def tenant(allocation: str = ID) -> GpuShare:
    return gpu_share(allocation)


def granted(*mechanisms: str, allocation: str = ID, cdi: bool = False) -> Allocation:
    return Allocation(id=allocation, mechanisms=mechanisms, cdi=cdi)


@dataclass
class Files(Backend):
    """A mechanism that keeps one file for each tenant."""

    folder: Path
    name: BackendName = "mps"
    limits: Mapping[Resource, Strength] = field(default_factory=lambda: {"core": "soft", "memory": "soft"})
    obstacle: str | None = None
    error: Exception | None = None
    seen: list[list[str]] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    vacated: list[str] = field(default_factory=list)

    async def check_node(self) -> None:
        if self.obstacle is not None:
            raise GpumgrError(self.obstacle)

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        if kind == "memory":
            return ContainerResponse(envs={"MEMORY": str(tenant.gpus[0].memory_bytes)})
        return ContainerResponse(envs={"CORES": str(tenant.gpus[0].cores), "NVIDIA_VISIBLE_DEVICES": "void"})

    async def put_limits(self, tenant: GpuShare) -> None:
        if self.error is not None:
            raise self.error
        (self.folder / tenant.allocation).write_text("here")

    async def vacate(self, uuids: Collection[str]) -> None:
        self.vacated += uuids

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        self.seen.append([each.tenant.allocation for each in running])
        if self.error is not None:
            raise self.error
        return [Finding(allocation=each.tenant.allocation, code="tampered", message="it did") for each in running]

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[str, str]:
        if self.error is not None:
            raise self.error
        return {each.tenant.allocation: "it keeps it" for each in running if each.pids}

    def remains(self) -> Collection[str]:
        return os.listdir(self.folder)

    async def cleanup(self, allocation: str) -> None:
        (self.folder / allocation).unlink(missing_ok=True)

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        self.recovered = [each.allocation for each in tenants]

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:
        return started.keys() & {17}


class Node:
    """An enforcer with one mechanism beside "none"."""

    def __init__(
        self,
        folder: Path,
        *,
        setting: Literal["auto", "mps", "hami-core", "none"] = "auto",
        overrides: Sequence[str] = (),
        with_cdi: bool = False,
        mechanism: BackendName = "mps",
    ) -> None:
        (folder / "mps").mkdir()
        self.files, self.cdi_dir = Files(folder / "mps", name=mechanism), folder / "cdi"
        self.clock, self.told, self.used = Clock(), list[str](), set[str]()
        self.others_on_gpus = list[tuple[str, tuple[str, ...]]]()
        #: Why the host's processes can't be looked at.
        self.blind: OSError | None = None
        self.limits = Enforcer(
            [self.files, Unlimited(lambda _tenant, message: self.told.append(message))],
            EnforcementSettings(
                backend=setting, overrides=tuple(overrides), cdi_dir=self.cdi_dir, injection="cdi" if with_cdi else "mounts"
            ),
            in_use=self._in_use,
            others_on_gpus=lambda _: self.others_on_gpus,
            clock=self.clock,
        )

    def _in_use(self, names: Collection[str]) -> Collection[str]:
        if self.blind is not None:
            raise self.blind
        return self.used & set(names)


async def test_the_answer_has_the_limits_in_it(tmp_path: Path) -> None:
    made = Node(tmp_path, setting="mps")
    await made.limits.choose()
    assert made.limits.terms(None, share=True) == EnforcementTerms(mechanisms=("mps",))
    core = made.limits.answer(BASE, "core", granted("mps"), tenant())
    assert core.envs == {"NVIDIA_VISIBLE_DEVICES": "void", "CORES": "30"}
    assert core.mounts == BASE.mounts
    assert core.annotations == {"tencent.com/vcuda-core": "30", "gpumgr.io/enforcement": "mps"}
    memory = made.limits.answer(ContainerResponse(), "memory", granted("mps"), tenant())
    assert memory.envs == {"MEMORY": str(1 << 30)}


async def test_whole_gpus_are_answered_without_limits(tmp_path: Path) -> None:
    made = Node(tmp_path)
    assert made.limits.terms(None, share=False) == EnforcementTerms()
    assert made.limits.answer(BASE, "core", granted(), None) == BASE


async def test_a_container_of_replicas_has_everything_in_one_response(tmp_path: Path) -> None:
    made = Node(tmp_path, with_cdi=True)
    limited = made.limits.answer(BASE, "replica", granted("mps"), tenant())
    assert limited.envs == {"NVIDIA_VISIBLE_DEVICES": "void", "CORES": "30", "MEMORY": str(1 << 30)}
    by_name = made.limits.answer(BASE, "replica", granted("mps", cdi=True), tenant())
    assert by_name.cdi_devices == (cdi.device_name(ID),)
    assert by_name.annotations == limited.annotations


async def test_with_cdi_the_response_has_a_name_and_the_file_has_the_edits(tmp_path: Path) -> None:
    made = Node(tmp_path, with_cdi=True)
    assert made.limits.terms(None, share=False) == EnforcementTerms(cdi=True)
    core = made.limits.answer(BASE, "core", granted("mps", cdi=True), tenant())
    assert core.cdi_devices == (f"gpumgr.io/gpu={ID}",)
    assert (core.envs, core.devices, core.mounts) == ({}, (), BASE.mounts)
    memory = made.limits.answer(ContainerResponse(annotations={"m": "1"}), "memory", granted("mps", cdi=True), tenant())
    assert memory == ContainerResponse(annotations={"m": "1", "gpumgr.io/enforcement": "mps"})
    await made.limits.start(BASE, granted("mps", cdi=True), tenant())
    assert (made.cdi_dir / cdi.file_name(ID)).stat().st_mode & 0o777 == 0o644
    document = json.loads((made.cdi_dir / cdi.file_name(ID)).read_text())
    assert document["devices"][0]["containerEdits"]["env"] == ["CORES=30", f"MEMORY={1 << 30}", "NVIDIA_VISIBLE_DEVICES=void"]
    assert os.listdir(made.cdi_dir) == [cdi.file_name(ID)]


def gpu(index: int) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", minor=index, bus_id=None, model="NVIDIA A10", memory_bytes=1 << 30)


async def test_auto_does_not_take_a_mechanism_that_the_node_can_not_use_and_a_change_is_logged_once(tmp_path: Path) -> None:
    made, gpus = Node(tmp_path, mechanism="limiter"), [gpu(0), replace(gpu(1), mig_enabled=True)]
    made.files.obstacle = "the library is missing"
    with capture_logs() as logs:
        for _ in range(2):
            assert (await made.limits.choose(gpus)).mechanisms == ("none",)
        made.files.obstacle = None
        for _ in range(2):
            assert (await made.limits.choose(gpus)).mechanisms == ("limiter",)
        made.files.limits = {"core": "hard", "memory": "soft"}
        for _ in range(2):
            await made.limits.choose(gpus)
    on_mig = "GPU 1: memory none (limiter can't be used), cores none (limiter can't be used)"
    limited = "GPU 0: memory soft (limiter), cores {} (limiter); " + on_mig
    assert [(line["log_level"], line["uses"], line["limits"].partition("; measured")[0]) for line in logs] == [
        ("warning", "none", "GPU 0-1: memory none, cores none"),
        ("info", "limiter", limited.format("soft")),
        ("info", "limiter", limited.format("hard")),
    ]


async def test_a_named_mechanism_that_the_node_can_not_use_stays_and_the_reason_is_logged(tmp_path: Path) -> None:
    made = Node(tmp_path, setting="mps")
    made.files.obstacle = "the daemon does not start"
    with capture_logs() as logs:
        await made.limits.choose([gpu(0)])
        await made.limits.choose([gpu(0)])
    assert made.limits.terms(None, share=True) == EnforcementTerms(mechanisms=("mps",))
    (line,) = logs
    assert (line["log_level"], line["broken"]) == ("warning", {"mps": "the daemon does not start"})
    assert line["limits"] == "GPU 0: memory none (mps can't be used), cores none (mps can't be used)"


async def test_a_container_without_limits_is_reported(tmp_path: Path) -> None:
    made = Node(tmp_path, overrides=["team=none"], setting="hami-core")
    await made.limits.choose()
    terms = made.limits.terms(PodView(namespace="team", name="p", uid="u"), share=True)
    assert terms == EnforcementTerms(mechanisms=("none",), exemption="team")
    await made.limits.start(BASE, granted("none"), tenant())
    assert made.told == [
        "nothing on this node keeps container main within its 30 cores and 1024 MiB of GPU memory (enforcement backend none); "
        "`gpumgr doctor` on the node says which backends could"
    ]


async def test_a_start_that_fails_is_refused_with_the_failing_backend(tmp_path: Path) -> None:
    made = Node(tmp_path)
    made.files.error = OSError(28, "No space left on device", "/run/x")
    with pytest.raises(Refusal, match=r"team/p \(main\) can't start with the backend mps: /run/x: No space left on device"):
        await made.limits.start(BASE, granted("mps"), tenant())
    with pytest.raises(Refusal, match="no enforcement backend 'green'"):
        await made.limits.start(BASE, granted("green"), tenant())


async def test_each_mechanism_receives_its_own_containers(tmp_path: Path, running: RunningContainer) -> None:
    made = Node(tmp_path)
    findings = await made.limits.observe([(running, ("mps",)), (running, ("none",))])
    assert made.files.seen == [[ID]]
    assert [(name, finding.code) for name, finding in findings] == [("mps", "tampered")]
    made.files.error = GpumgrError("away")
    assert await made.limits.observe([(running, ("mps",))]) == []
    assert await made.limits.adjust([(running, ("mps",)), (running, ("none",))]) == {ID: "away"}
    made.files.error = None
    assert await made.limits.adjust([(replace(running, pids=(7,)), ("mps",))]) == {ID: "it keeps it"}
    assert await made.limits.adjust([(replace(running, pids=(7,)), ("none",)), (running, ("mps",))]) == {}
    assert made.limits.own_pids({17: 5, 18: 5}) == {17}
    await made.limits.recover([(tenant(), ("mps",)), (tenant("0" * 16), ("none",))])
    await made.limits.vacate(["GPU-1"])
    assert (made.files.recovered, made.files.vacated) == ([ID], ["GPU-1"])


@pytest.fixture
def running() -> RunningContainer:
    return RunningContainer(tenant=tenant(), container=Container(id="c", pod=("team", "p"), pod_uid="u", name="main"))


async def test_what_is_left_is_removed_after_the_grace_and_never_under_a_living_process(tmp_path: Path) -> None:
    made = Node(tmp_path, with_cdi=True)
    for each in (ID, "ffffffffffffffff"):
        await made.limits.start(BASE, granted("mps", allocation=each, cdi=True), tenant(each))
    await made.limits.tend(lambda: {ID})
    made.clock.now += 59
    await made.limits.tend(lambda: {ID})
    assert len(made.files.remains()) == 2
    made.clock.now += 2
    made.used.add("ffffffffffffffff")
    await made.limits.tend(lambda: {ID})
    assert len(made.files.remains()) == 2
    made.used.clear()
    await made.limits.tend(lambda: {ID})
    assert made.files.remains() == [ID]
    assert os.listdir(made.cdi_dir) == [cdi.file_name(ID)]


async def test_without_access_to_mounts_nothing_is_removed_and_this_is_reported_once(tmp_path: Path) -> None:
    made = Node(tmp_path)
    await made.limits.start(BASE, granted("mps"), tenant())
    await made.limits.tend(set)
    made.clock.now += 60
    made.blind = PermissionError(13, "Permission denied")
    with capture_logs() as told:
        for _ in range(3):
            await made.limits.tend(set)
    assert made.files.remains() == [ID]
    assert [each["event"] for each in told] == ["orphans_kept"]
    assert "CAP_SYS_PTRACE" in told[0]["remedy"]
    made.blind = None
    await made.limits.tend(set)
    assert made.files.remains() == []


@pytest.mark.parametrize("spoil", [lambda path: path.symlink_to("cdi"), Path.touch], ids=["link loop", "file"])
async def test_an_unreadable_cdi_folder_is_reported_once_and_the_rest_goes_on(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    made = Node(tmp_path)
    await made.limits.start(BASE, granted("mps"), tenant())
    spoil(made.cdi_dir)
    with capture_logs() as logged:
        for _ in range(3):
            await made.limits.tend(set)
            made.clock.now += 60
    assert [(each["event"], each["backend"]) for each in logged if each["log_level"] == "warning"] == [
        ("orphans_not_listed", "cdi"),
        ("orphan_not_removed", "cdi"),
    ]
    assert made.files.remains() == []
    made.cdi_dir.unlink()
    with capture_logs() as logged:
        await made.limits.tend(set)
    assert logged == []


async def test_mps_shares_no_gpu_with_another_mechanism(tmp_path: Path) -> None:
    made = Node(tmp_path)
    made.others_on_gpus.append(("team/old (main)", ("none",)))
    with pytest.raises(Refusal, match=r"limited by MPS, and team/old \(main\) uses the same GPU through another mechanism"):
        await made.limits.start(BASE, granted("mps"), tenant())
    await made.limits.start(BASE, granted("none"), tenant())
    made.others_on_gpus[:] = [("team/old (main)", ("mps",))]
    await made.limits.start(BASE, granted("mps"), tenant())
    with pytest.raises(Refusal, match=r"limited by none, and .* through MPS"):
        await made.limits.start(BASE, granted("none"), tenant())


@pytest.mark.parametrize("mechanism", ["none", "mps"])
async def test_a_share_without_mps_does_not_start_on_a_gpu_that_an_idle_daemon_keeps_exclusive(
    tmp_path: Path, mechanism: str
) -> None:
    made = Node(tmp_path)
    await made.limits.start(BASE, granted(mechanism), tenant())
    assert made.files.vacated == ([] if mechanism == "mps" else [gpu.uuid for gpu in tenant().gpus])


async def test_an_error_of_one_backend_does_not_affect_the_others(tmp_path: Path) -> None:
    made = Node(tmp_path)

    async def check_node() -> None:
        raise OSError(5, "Input/output error")

    made.files.check_node = check_node  # type: ignore[method-assign]
    choice = await made.limits.choose()
    assert choice.mechanisms == ("none",)
    assert "Input/output error" in choice.obstacles["mps"]
    shutil.rmtree(made.files.folder)
    assert await made.limits.tend(set) is None


async def test_limits_of_running_containers_change_where_each_backend_that_has_them_can_change_them(tmp_path: Path) -> None:
    limits = Node(tmp_path).limits
    fixed = "the backend mps can't change the limit of {} of a running container"
    assert [limits.obstacle_to_change(("mps",), each) for each in RESOURCES] == [fixed.format("cores"), fixed.format("memory")]
    assert limits.obstacle_to_change(("none",), "core") == "no backend limits the container's cores"
    limits.backends["mps"].adjustable = True
    assert [limits.obstacle_to_change(("mps",), each) for each in RESOURCES] == [None, None]
    limits.backends["mps"].running_keep_limits = True
    why = "with the backend mps, programs that run keep the limits with which they started"
    assert [limits.obstacle_to_burst(each) for each in (("mps",), ("none",))] == [
        why,
        "no backend limits the container's memory",
    ]
    limits.backends["mps"].kept_bytes = lambda: {"a": 5}  # type: ignore[method-assign]
    assert limits.kept_bytes() == {"a": 5}
    limits.backends["mps"].limits = {"memory": "hard"}
    assert limits.obstacle_to_change(("mps",), "core") == "no backend limits the container's cores"
    assert limits.obstacle_to_change(("mps",), "memory") is None
    limits.backends["mps"].limits = {"core": "hard"}
    assert limits.obstacle_to_burst(("mps",)) == "no backend limits the container's memory"
