"""gpu-manager's running pods, when its file is there, when it is not, and when nobody tells."""

import json
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpumgr.agent.admission import Admission
from gpumgr.agent.books import Books
from gpumgr.agent.housekeeping import INCOMPLETE_SECONDS, Housekeeping
from gpumgr.agent.offers import Offers
from gpumgr.allocator.ledger import Ledger
from gpumgr.allocator.listing import Listing
from gpumgr.allocator.pods import PodView
from gpumgr.app.recovery import TakeOver
from gpumgr.deviceplugin.kubelet_checkpoint import FILE_NAME
from gpumgr.errors import CheckpointError, KubeletError
from gpumgr.units import CORE_RESOURCE
from tests.component.stage.stage import Clock, Drift, MemoryCheckpoint, MemoryPods, snapshot

FOREIGN = tuple(f"{CORE_RESOURCE}-{n}" for n in range(30))
OURS = ("0badc0de-c00", "0badc0de-c01")


@dataclass
class Kubelet:
    """Its API; None: it does not answer."""

    listing: Listing | None = field(default_factory=lambda: Listing.of({}))

    async def list(self) -> Listing:
        if self.listing is None:
            raise KubeletError("no kubelet")
        return self.listing


class Scene:
    """A node whose GPUs are known, a kubelet, and what stands in the two files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kubelet, self.clock = folder, Kubelet(), Clock()
        self.checkpoint, self.pods = MemoryCheckpoint(), MemoryPods()
        self.remembered = 0
        self.books = Books(
            Ledger(),
            checkpoint=self.checkpoint,
            offers=Offers(lambda _: None, clock=self.clock),
            meter=Drift(),
            runs=lambda _: True,
            policy="binpack",
            clock=self.clock,
        )

    def take_over(self, *, done: bool = False) -> TakeOver:
        """Of a new start."""
        admission = Admission(self.pods, self.kubelet, pod_wait_seconds=0, clock=self.clock)
        ids = (f"{n:016x}" for n in count(1))
        housekeeping = Housekeeping(
            books=self.books, admission=admission, pods=self.pods, new_id=lambda: next(ids), clock=self.clock
        )

        async def remember() -> None:
            if self.checkpoint.full:
                raise CheckpointError("the disk is full")
            self.remembered += 1

        async def wait_synced() -> None:
            self.pods.synced = self.pods.synced or bool(self.pods.views)

        made = TakeOver(
            self.folder / "gpu-manager.json",
            self.folder,
            books=self.books,
            housekeeping=housekeeping,
            admission=admission,
            pods=self.pods,
            done=done,
            remember=remember,
            wait_synced=wait_synced,
            clock=self.clock,
        )
        self.books.before_first_offer = made.first
        return made

    async def show_gpus(self) -> None:
        await self.books.set_snapshot(snapshot())

    def records(self, *uids: str) -> None:
        record = {"main": {"Devices": ["/dev/nvidia0"], "Cores": 30, "Memory": 4 << 28}}
        (self.folder / "gpu-manager.json").write_text(json.dumps({"PodGPUMapping": dict.fromkeys(uids, record)}))

    def kubelets_file(self, *uids: str, ids: tuple[str, ...] = FOREIGN) -> None:
        entries = [
            {"PodUID": uid, "ContainerName": "main", "ResourceName": CORE_RESOURCE, "DeviceIDs": [*ids], "AllocResp": None}
            for uid in uids
        ]
        (self.folder / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))

    def runs(self, name: str, uid: str, phase: str = "Running") -> None:
        """The API server shows this pod, and the kubelet, if it has not ended."""
        view = PodView(namespace="team", name=name, uid=uid, phase=phase, created_at=0.0, containers=())
        self.pods.views[view.key] = view
        if not view.ended:
            self.kubelet.listing = Listing.of({view.key: {"main": {CORE_RESOURCE: FOREIGN}}})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def named(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


async def test_a_node_without_gpu_manager_is_free_at_once_and_for_good(scene: Scene) -> None:
    take_over = scene.take_over()
    await scene.show_gpus()
    assert scene.remembered == 0
    with capture_logs() as logs:
        assert await take_over.held_back_by() is None
    assert (scene.remembered, logs) == (1, [])


async def test_ids_of_ours_are_nobody_elses_also_of_a_gpu_that_is_gone(scene: Scene) -> None:
    scene.kubelets_file("u1", ids=OURS)
    scene.runs("a", "u1")
    assert await scene.take_over().held_back_by() is None


async def test_ids_of_which_no_file_tells_hold_everything_back_until_their_pods_end(scene: Scene) -> None:
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.kubelets_file("u1", "u2")
    scene.runs("a", "u1")
    scene.pods.views |= {("team", "over"): PodView(namespace="team", name="over", uid="u2", phase="Failed")}
    with capture_logs() as logs:
        reasons = [await take_over.held_back_by() for _ in range(2)]
    assert reasons[0] == reasons[1]
    assert str(reasons[0]).startswith(f"team/a (main), team/over (main) hold GPUs from gpu-manager, and {scene.folder}")
    assert "gpuManager.takeOver=true" in str(reasons[0])
    (line,) = named(logs, "foreign_allocations")
    assert (line["log_level"], line["holders"]) == ("error", ("team/a (main)", "team/over (main)"))
    scene.kubelet.listing = Listing.of({})
    scene.runs("a", "u1", "Succeeded")
    assert scene.remembered == 0
    assert await take_over.held_back_by() is None
    assert scene.remembered == 1


async def test_a_kubelet_that_does_not_answer_proves_no_end(scene: Scene) -> None:
    scene.kubelets_file("u1")
    scene.kubelet.listing = None
    assert "pod uid u1 (main)" in str(await scene.take_over().held_back_by())


async def test_without_an_api_server_the_kubelet_has_time_to_show_its_pods(scene: Scene) -> None:
    scene.pods.synced = False
    scene.kubelets_file("u1")
    take_over = scene.take_over()
    assert await take_over.held_back_by() is not None
    scene.clock.now += INCOMPLETE_SECONDS - 1
    assert await take_over.held_back_by() is not None
    scene.clock.now += 1
    assert await take_over.held_back_by() is None


async def test_records_are_taken_over_and_told_once(scene: Scene) -> None:
    scene.records("u1")
    scene.kubelets_file("u1")
    scene.runs("a", "u1")
    take_over = scene.take_over()
    with capture_logs() as logs:
        await scene.show_gpus()
        assert await take_over.held_back_by() is None
    assert [line["taken"] for line in named(logs, "taken_over_from_gpu_manager")] == [1]
    (a,) = scene.books.ledger.allocations.values()
    assert (a.pod, a.uid, a.core_count, a.anonymous) == (("team", "a"), "u1", 30, True)
    assert scene.remembered == 1


async def test_what_gpu_manager_gave_out_until_it_stopped_is_taken_over_too(scene: Scene) -> None:
    scene.records("u1")
    scene.kubelets_file("u1")
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.records("u1", "u2")
    scene.kubelets_file("u1", "u2")
    assert await take_over.held_back_by() is None
    assert sorted(str(a.uid) for a in scene.books.ledger.allocations.values()) == ["u1", "u2"]


async def test_a_driver_that_comes_late_is_waited_for_by_the_records(scene: Scene) -> None:
    scene.records("u1")
    scene.kubelets_file("u1")
    take_over = scene.take_over()
    assert await take_over.held_back_by() is None
    assert (scene.remembered, len(scene.books.ledger.allocations)) == (0, 0)
    await scene.show_gpus()
    assert (scene.remembered, len(scene.books.ledger.allocations)) == (1, 1)


async def test_a_file_that_can_not_be_read_tells_nothing(scene: Scene) -> None:
    (scene.folder / "gpu-manager.json").write_text("{")
    take_over = scene.take_over()
    await scene.show_gpus()
    scene.kubelets_file("u1")
    scene.runs("a", "u1")
    with capture_logs() as logs:
        assert await take_over.held_back_by() is not None
    assert named(logs, "gpu_manager_checkpoint_unreadable") == []  # that was told with the first GPUs
    scene.pods.views.clear()
    scene.kubelet.listing = Listing.of({})
    assert await take_over.held_back_by() is None
    assert scene.remembered == 0


async def test_a_kubelets_file_that_can_not_be_read_is_read_at_the_next_start(scene: Scene) -> None:
    (scene.folder / FILE_NAME).write_text("{")
    take_over = scene.take_over()
    await scene.show_gpus()
    assert await take_over.held_back_by() is None
    assert scene.remembered == 0
    scene.kubelets_file()
    assert await scene.take_over().held_back_by() is None


async def test_a_full_disk_takes_nothing_over_and_offers_nothing(scene: Scene) -> None:
    scene.records("u1")
    await scene.show_gpus()
    scene.checkpoint.full = True
    take_over = scene.take_over()
    assert "can't be remembered" in str(await take_over.held_back_by())
    scene.checkpoint.full = False
    assert await take_over.held_back_by() is None
    assert (scene.remembered, len(scene.books.ledger.allocations)) == (1, 1)


async def test_a_kubelet_that_knows_of_no_device_has_forgotten_nobody(scene: Scene) -> None:
    scene.records("u1")
    scene.kubelets_file()
    scene.take_over()
    await scene.show_gpus()
    assert len(scene.books.ledger.allocations) == 1


async def test_once_done_only_a_gpu_manager_that_came_back_counts(scene: Scene) -> None:
    scene.records("u1")
    scene.kubelets_file("u9", ids=OURS)
    take_over = scene.take_over(done=True)
    await scene.show_gpus()
    assert await take_over.held_back_by() is None
    assert scene.books.ledger.allocations == {}

    scene.kubelets_file("u1", "u2")
    scene.runs("b", "u2")
    again = scene.take_over(done=True)
    await scene.show_gpus()
    assert [a.uid for a in scene.books.ledger.allocations.values()] == ["u1"]
    assert str(await again.held_back_by()).startswith("team/b (main) hold GPUs")
