"""Takeover of gpu-manager's running pods, with its file, without its file, and without any record."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.reconciler import INCOMPLETE_SECONDS
from gpumgr.common.errors import CheckpointError, KubeletError
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.compat.gpu_manager.running_pods import TakeOver
from gpumgr.kubelet.records import FILE_NAME
from gpumgr.ledger.answer import HostPaths
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node import NodeDevices
from gpumgr.placement.pods import Listing, PodKey, PodView
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, KubeletSettings
from tests.component.stage.stage import Clock, MemoryAgent, MemoryCheckpoint, MemoryPods, MemoryRuntime, snapshot
from tests.listings import listing_from

GPU = "00000000"
OURS = ("0badc0de-c00", "0badc0de-c01")


def foreign(uid: str) -> tuple[str, ...]:
    """Ids as gpu-manager gives them, this pod's."""
    return tuple(f"{CORE_RESOURCE}-{uid}-{n}" for n in range(30))


@dataclass
class Kubelet:
    """Its API; None: it does not answer."""

    listing: Listing | None = field(default_factory=lambda: listing_from({}))

    async def list(self) -> Listing:
        if self.listing is None:
            raise KubeletError("no kubelet")
        return self.listing


class TakeoverNode(MemoryAgent):
    """A node with known GPUs, a kubelet, and the contents of the two files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MemoryPods(synced=False), MemoryCheckpoint(), MemoryRuntime(), clock=Clock(), limits=None)
        self.folder, self.kubelet = folder, Kubelet()
        self.shown: dict[PodKey, dict[str, dict[str, tuple[str, ...]]]] = {}
        self.remembered = 0
        self.started: TakeOver | None = None
        self.offered: list[NodeDevices] = []
        host = HostPaths(exists=lambda _path: False, allocation_dir=str(folder))
        self.build(Ledger(), self.kubelet, host, before_offer=self._before_offer)

    def publish(self, node_devices: NodeDevices) -> None:
        self.offered.append(node_devices)

    async def _before_offer(self) -> None:
        if self.started is not None:
            await self.started.before_offer()

    def take_over(self, *, done: bool = False) -> TakeOver:
        """The take-over of a new start."""

        async def remember() -> None:
            if self.checkpoint.full:
                raise CheckpointError("the disk is full")
            self.remembered += 1

        async def wait_synced() -> None:
            self.pods.synced = self.pods.synced or bool(self.pods.views)

        self.started = TakeOver(
            Settings(
                checkpoint=CheckpointSettings(gpu_manager_checkpoint=self.folder / "gpu-manager.json"),
                kubelet=KubeletSettings(device_plugin_dir=self.folder),
            ),
            agent_state=self.agent_state,
            reconciler=self.reconciler,
            admission=self.admission,
            pods=self.pods,
            remember=None if done else remember,
            wait_synced=wait_synced,
            clock=self.clock,
        )
        return self.started

    async def held_back_by(self, *, done: bool = False, gpus: int = 4) -> str | None:
        """What holds a new start back, once the driver has shown its GPUs."""
        take_over = self.take_over(done=done)
        await self.show_gpus(gpus)
        return await take_over.held_back_by()

    async def show_gpus(self, number: int = 4) -> None:
        await self.agent_state.set_snapshot(snapshot(number))

    def taken(self) -> list[tuple[str | None, tuple[str, ...]]]:
        return [(a.uid, tuple(a.gpus)) for a in self.agent_state.ledger.check().allocations.values()]

    def records(self, *uids: str, minors: tuple[int, ...] = (0,), cores: int = 30) -> None:
        record = {"main": {"Devices": [f"/dev/nvidia{minor}" for minor in minors], "Cores": cores, "Memory": 4 << 28}}
        (self.folder / "gpu-manager.json").write_text(json.dumps({"PodGPUMapping": dict.fromkeys(uids, record)}))

    def runs_since_gpu_manager(self, *pods: tuple[str, str], minors: tuple[int, ...] = (0,), cores: int = 30) -> None:
        """These pods, as name and UID, have a record, ids in the kubelet's file, and run."""
        uids = [uid for _, uid in pods]
        self.records(*uids, minors=minors, cores=cores)
        self.kubelets_file(*uids)
        for name, uid in pods:
            self.pod_runs(name, uid)

    def kubelets_file(self, *uids: str, ids: tuple[str, ...] = (), ours: tuple[str, ...] = ()) -> None:
        """`ours`: pods with ids of ours on the first GPU, beside `uids`."""
        held = [(uid, ids or foreign(uid)) for uid in uids] + [(uid, tuple(f"{GPU}-c{n:02}" for n in range(50))) for uid in ours]
        entries = [
            {"PodUID": uid, "ContainerName": "main", "ResourceName": CORE_RESOURCE, "DeviceIDs": [*has], "AllocResp": None}
            for uid, has in held
        ]
        (self.folder / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))

    def pod_runs(self, name: str, uid: str, phase: str = "Running") -> None:
        """The API server shows this pod, and the kubelet, if it has not ended."""
        view = PodView(namespace="team", name=name, uid=uid, phase=phase, created_at=0.0, containers=())
        self.pods.views[view.key] = view
        self.pods.synced = True
        if view.ended:
            self.shown.pop(view.key, None)
        else:
            self.shown[view.key] = {"main": {CORE_RESOURCE: foreign(uid)}}
        if self.kubelet.listing is not None:
            self.kubelet.listing = listing_from(self.shown)


@pytest.fixture
def scene(tmp_path: Path) -> TakeoverNode:
    return TakeoverNode(tmp_path)


def named(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


async def test_a_node_without_gpu_manager_is_free_at_once_and_for_good(scene: TakeoverNode) -> None:
    take_over = scene.take_over()
    await scene.show_gpus()
    assert scene.remembered == 0
    with capture_logs() as logs:
        assert await take_over.held_back_by() is None
    assert (scene.remembered, logs) == (1, [])


async def test_our_ids_are_not_taken_for_gpu_managers_also_of_a_gpu_that_is_gone(scene: TakeoverNode) -> None:
    scene.kubelets_file("u1", ids=OURS)
    scene.pod_runs("a", "u1")
    assert await scene.take_over().held_back_by() is None


async def test_ids_in_no_file_withhold_all_devices_until_their_pods_end(scene: TakeoverNode) -> None:
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.kubelets_file("u1", "u2")
    scene.pod_runs("a", "u1")
    scene.pod_runs("over", "u2")
    scene.pods.views |= {("team", "over"): PodView(namespace="team", name="over", uid="u2", phase="Failed")}
    with capture_logs() as logs:
        reasons = [await take_over.held_back_by() for _ in range(2)]
    assert reasons[0] == reasons[1]
    assert str(reasons[0]).startswith(f"team/a (main), team/over (main) hold GPUs from gpu-manager, and {scene.folder}")
    assert "gpuManager.takeOver=true" in str(reasons[0])
    (line,) = named(logs, "foreign_allocations")
    assert (line["log_level"], line["holders"]) == ("error", ("team/a (main)", "team/over (main)"))
    scene.pod_runs("over", "u2", "Failed")
    scene.pod_runs("a", "u1", "Succeeded")
    assert scene.remembered == 0
    assert await take_over.held_back_by() is None
    assert scene.remembered == 1


async def test_a_kubelet_that_does_not_answer_proves_no_end(scene: TakeoverNode) -> None:
    scene.kubelets_file("u1")
    scene.kubelet.listing = None
    assert "pod uid u1 (main)" in str(await scene.take_over().held_back_by())


async def test_without_an_api_server_the_kubelet_has_time_to_show_its_pods(scene: TakeoverNode) -> None:
    scene.pods.synced = False
    scene.kubelets_file("u1")
    take_over = scene.take_over()
    assert await take_over.held_back_by() is not None
    scene.clock.now += INCOMPLETE_SECONDS - 1
    assert await take_over.held_back_by() is not None
    scene.clock.now += 1
    assert await take_over.held_back_by() is None


async def test_records_are_taken_over_and_logged_once(scene: TakeoverNode) -> None:
    scene.runs_since_gpu_manager(("a", "u1"))
    with capture_logs() as logs:
        assert await scene.held_back_by() is None
    assert [line["taken"] for line in named(logs, "taken_over_from_gpu_manager")] == [1]
    (a,) = scene.agent_state.ledger.allocations.values()
    assert (a.pod, a.uid, a.cores, a.anonymous) == (("team", "a"), "u1", 30, True)
    assert scene.remembered == 1


async def test_what_gpu_manager_gave_out_until_it_stopped_is_taken_over_too(scene: TakeoverNode) -> None:
    scene.records("u1")
    scene.kubelets_file("u1")
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.records("u1", "u2")
    scene.kubelets_file("u1", "u2")
    assert await take_over.held_back_by() is None
    assert sorted(str(a.uid) for a in scene.agent_state.ledger.allocations.values()) == ["u1", "u2"]


async def test_an_unreadable_file_counts_as_no_record(scene: TakeoverNode) -> None:
    (scene.folder / "gpu-manager.json").write_text("{")
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.kubelets_file("u1")
    scene.pod_runs("a", "u1")
    with capture_logs() as logs:
        assert await take_over.held_back_by() is not None
    assert named(logs, "gpu_manager_checkpoint_unreadable") == []  # logged with the first GPUs
    scene.pods.views.clear()
    scene.kubelet.listing = listing_from({})
    assert await take_over.held_back_by() is None
    assert scene.remembered == 0


async def test_a_kubelets_file_that_can_not_be_read_is_read_at_the_next_start(scene: TakeoverNode) -> None:
    (scene.folder / FILE_NAME).write_text("{")
    assert await scene.held_back_by() is None
    assert scene.remembered == 0
    scene.kubelets_file()
    assert await scene.take_over().held_back_by() is None


async def test_a_full_disk_takes_nothing_over_and_offers_nothing(scene: TakeoverNode) -> None:
    scene.records("u1")
    await scene.show_gpus()
    scene.checkpoint.full = True
    take_over = scene.take_over()
    assert "can't be saved" in str(await take_over.held_back_by())
    scene.checkpoint.full = False
    assert await take_over.held_back_by() is None
    assert (scene.remembered, len(scene.agent_state.ledger.allocations)) == (1, 1)


async def test_once_done_only_a_gpu_manager_that_came_back_counts(scene: TakeoverNode) -> None:
    scene.records("u1")
    scene.kubelets_file("u9", ids=OURS)
    assert await scene.held_back_by(done=True) is None
    assert scene.agent_state.ledger.allocations == {}

    scene.kubelets_file("u1", "u2")
    scene.pod_runs("b", "u2")
    scene.pod_runs("a", "u1")
    again = scene.take_over(done=True)
    await scene.show_gpus()
    assert [a.uid for a in scene.agent_state.ledger.allocations.values()] == ["u1"]
    assert str(await again.held_back_by()).startswith("team/b (main) hold GPUs")


async def with_gpu_3_late(scene: TakeoverNode, *minors: int) -> None:
    """A container runs that has the GPUs of these minors, and the driver shows three GPUs as yet."""
    scene.runs_since_gpu_manager(("a", "u1"), minors=minors, cores=100 * len(minors))
    assert await scene.held_back_by(gpus=3) is None


async def test_a_record_of_a_gpu_found_later_is_adopted_before_the_gpu_is_offered(scene: TakeoverNode) -> None:
    await with_gpu_3_late(scene, 3)
    assert (scene.taken(), scene.remembered) == ([], 0)
    scene.device_lists.start()
    (scene.folder / "gpu-manager.json").write_text("{")  # what was read once is known
    await scene.show_gpus(4)
    (late,) = [node_devices[3] for node_devices in scene.offered if len(node_devices) > 3]
    assert late.healthy_blocks == 0  # as of a GPU that somebody has whole
    assert (scene.taken(), scene.remembered) == ([("u1", ("00000003",))], 1)


async def test_each_gpu_of_a_record_is_waited_for(scene: TakeoverNode) -> None:
    await with_gpu_3_late(scene, 1, 3)
    assert (scene.taken(), scene.remembered) == ([("u1", ("00000001",))], 0)
    await scene.show_gpus(4)
    (a,) = scene.ledger.allocations.values()
    assert (a.pod, tuple(a.gpus), a.cores) == (("team", "a"), ("00000001", "00000003"), 200)
    assert scene.remembered == 1


async def test_a_late_gpu_that_could_not_be_remembered_at_once_has_its_holder_when_it_is(scene: TakeoverNode) -> None:
    await with_gpu_3_late(scene, 3)
    scene.checkpoint.full = True
    await scene.show_gpus(4)
    assert len(scene.agent_state.ledger.gpu_registry.gpus) == 3
    scene.checkpoint.full = False
    assert await scene.reconciler.sweep()
    assert (scene.taken(), scene.remembered) == ([("u1", ("00000003",))], 1)


async def test_a_record_without_room_holds_everything_back_and_is_tried_again_when_something_changes(scene: TakeoverNode) -> None:
    scene.runs_since_gpu_manager(("a", "u1"), ("b", "u2"), cores=100)
    take_over = scene.take_over()
    with capture_logs() as logs:
        await scene.show_gpus()
        reasons = [await take_over.held_back_by() for _ in range(3)]
    assert all(str(reason).startswith("team/b (main) hold GPUs") for reason in reasons)
    assert len(named(logs, "allocation_not_adopted")) == 1
    assert scene.remembered == 0
    (first,) = scene.agent_state.ledger.allocations
    scene.pod_runs("a", "u1", "Succeeded")
    await scene.agent_state.commit(scene.agent_state.ledger.free((first,)))
    assert await take_over.held_back_by() is None
    assert (scene.taken(), scene.remembered) == ([("u2", (GPU,))], 1)


async def test_after_a_lost_ledger_our_pods_keep_their_ids_beside_gpu_managers(scene: TakeoverNode) -> None:
    scene.records("u1")
    scene.kubelets_file("u1", ours=("u2",))
    scene.pod_runs("a", "u1")
    scene.pods.views |= {("team", "ours"): PodView(namespace="team", name="ours", uid="u2", phase="Running")}
    with capture_logs() as logs:
        assert await scene.held_back_by() is None
    ledger = scene.ledger
    held = {a.uid: (a.pod, a.held("core")[GPU], a.anonymous) for a in ledger.allocations.values()}
    assert held == {"u2": (("team", "ours"), (1 << 50) - 1, False), "u1": (("team", "a"), ((1 << 30) - 1) << 50, True)}
    assert named(logs, "allocation_not_adopted") == []


async def test_without_podresources_the_api_server_decides_after_a_while(scene: TakeoverNode) -> None:
    scene.kubelets_file("u1", "u2")
    scene.pod_runs("a", "u1")
    scene.kubelet.listing = None
    take_over = scene.take_over()
    assert "team/a (main), pod uid u2 (main)" in str(await take_over.held_back_by())
    scene.clock.now += INCOMPLETE_SECONDS
    assert str(await take_over.held_back_by()).startswith("team/a (main) hold")
    scene.pod_runs("a", "u1", "Failed")
    assert await take_over.held_back_by() is not None
    scene.clock.now += INCOMPLETE_SECONDS - 1
    assert await take_over.held_back_by() is not None
    scene.clock.now += 1
    assert await take_over.held_back_by() is None


@pytest.mark.parametrize("done", [False, True])
async def test_records_of_pods_that_ended_are_left_behind(scene: TakeoverNode, done: bool) -> None:
    """Though the kubelet's file goes on naming them."""
    scene.records("over", "unknown")
    scene.kubelets_file("over", "unknown")
    scene.pod_runs("a", "over", "Succeeded")
    assert await scene.held_back_by(done=done) is None
    assert (scene.taken(), scene.remembered) == ([], 0 if done else 1)


async def test_a_static_pod_is_identified_by_the_kubelets_uid(scene: TakeoverNode) -> None:
    scene.records("static")
    scene.kubelets_file("static")
    scene.pod_runs("a", "mirror")
    view = scene.pods.views["team", "a"]
    scene.pods.views["team", "a"] = replace(view, runtime_uid="static")
    assert await scene.held_back_by() is None
    assert scene.taken() == [("static", (GPU,))]
