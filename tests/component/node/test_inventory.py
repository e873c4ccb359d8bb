"""The annotation gpumgr.io/inventory of the node: its content, and when it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from msgspec.structs import astuple, replace

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import Inventory, InventoryGpu, decode_inventory
from gpumgr.kube.publisher.node_reporter import ENDING_SECONDS, InventoryReporter
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Allocation, Resize
from gpumgr.ledger.quarantine import Quarantine
from gpumgr.placement.pods import ContainerSpec, NamedGpu, PodView, ResizeRequest
from gpumgr.placement.requests import ReplicaRequest
from tests.component.stage.mig import with_mig
from tests.component.stage.stage import Clock, MemoryPods
from tests.unit.web.metrics.pictures import BLOCKS, allocation, name_of, snapshot_of, uuid_of, view_of, whole

LOW = (1 << 30) - 1


@dataclass
class Node:
    """`written`: the values of the annotation, in order."""

    pods: MemoryPods = field(default_factory=MemoryPods)
    clock: Clock = field(default_factory=Clock)
    written: list[str] = field(default_factory=list)
    report: NodeReport = field(default_factory=lambda: NodeReport(view=view_of()))

    def __post_init__(self) -> None:
        self.reporter = InventoryReporter(
            self._annotate,
            pods=self.pods,
            enforcement=lambda: "mps",
            topology_manager="none",
            clock=self.clock,
        )

    def _annotate(self, key: str, value: str) -> None:
        assert key == "gpumgr.io/inventory"
        if value not in self.written[-1:]:
            self.written.append(value)

    def look(self, *allocations: Allocation, seconds: float = 1.0, **view: Any) -> int:
        """The number of writes one second later, with this state."""
        self.clock.now += seconds
        self.report = replace(self.report, view=view_of(*allocations, **view))
        self.reporter.report(self.report)
        return len(self.written)

    @property
    def inventory(self) -> Inventory:
        return decode_inventory(self.written[-1])

    @property
    def other(self) -> Mapping[str, object]:
        """Pod UID -> for each of its GPUs (position, cores, MiB), and the slices and replicas if it has some."""
        rows = {uid: [astuple(share) for share in shares] for uid, shares in self.inventory.other.items()}
        return {uid: tuple(row if any(row[3:]) else row[:3] for row in each) for uid, each in rows.items()}


def pod(letter: str, *shares: NamedGpu, phase: str = "Running", **names: tuple[NamedGpu, ...]) -> PodView:
    """A pod with the container "main" that the scheduler placed on `shares`."""
    placed = {"main": shares, **names} if shares else {}
    main = ContainerSpec(name="main", cores=30, memory_blocks=1)
    return PodView(
        namespace="team", name=letter, uid=f"uid-{letter}", phase=phase, containers=(main,), placed=tuple(placed.items())
    )


def share(letter: str, gpu: int, **more: Any) -> Allocation:
    return allocation(letter, ("team", letter), cores={gpu: LOW}, blocks={gpu: 1}, **more)


def named(gpu: int, cores: int = 30, memory: int = 256) -> NamedGpu:
    return uuid_of(gpu), Amounts(cores, memory)


def put(node: Node, *views: PodView) -> None:
    for view in views:
        node.pods.views[view.key] = view


def mig_view(*, in_mig_mode: bool = True, **inventory: Any) -> AgentView:
    """Both GPUs support MIG on demand, and are closed to others because it is enabled."""
    view = view_of()
    snapshot = with_mig(view.inventory.snapshot)
    uuids = [gpu.uuid for gpu in snapshot.gpus]
    health = HardwareHealth(cordoned=dict.fromkeys(uuids, "MIG is enabled"), in_mig_mode=uuids if in_mig_mode else ())
    changed = replace(view.inventory, snapshot=snapshot, health=health, **inventory)
    return replace(view, inventory=changed, node=changed.view(view.ledger.gpu_registry))


def test_an_inventory_describes_the_gpus_in_the_drivers_order() -> None:
    node = Node()
    busy = Quarantine(held={name_of(0): frozenset({(7, 70)})})
    assert node.look(nvlinks=4, failed={uuid_of(1): "XID 79"}, quarantine=busy) == 1
    found = node.inventory
    assert (found.driver, found.enforcement, found.topology_manager, found.other) == ("550.54.15", "mps", "none", {})
    gpu = InventoryGpu(uuid=uuid_of(0), model="NVIDIA A10", memory=BLOCKS * 256, numa=0, cordoned=True, replicas=0)
    sick = InventoryGpu(uuid=uuid_of(1), model="NVIDIA A10", memory=BLOCKS * 256, numa=1, healthy=False, replicas=0)
    assert found.gpus == (gpu, sick)
    assert found.topology() == snapshot_of(2, nvlinks=4).topology
    node.look(cordoned={uuid_of(1): "by the operator"})
    assert [(gpu.healthy, gpu.cordoned) for gpu in node.inventory.gpus] == [(True, False), (True, True)]
    node.look(cordoned={uuid_of(1): "by the operator"}, failed={uuid_of(1): "XID 79"})
    assert [(gpu.healthy, gpu.cordoned) for gpu in node.inventory.gpus] == [(True, False), (False, True)]


def test_only_what_the_scheduler_reads_changes_it() -> None:
    node = Node()
    assert [node.look(), node.look(), node.look(cordoned={uuid_of(1): "x"}), node.look(cordoned={uuid_of(1): "y"})] == [
        1,
        1,
        2,
        2,
    ]


def test_it_is_not_written_before_the_gpus_and_the_pods_are_known() -> None:
    node = Node(pods=MemoryPods(synced=False))
    assert node.look(share("a", 0)) == 0
    node.pods.synced = True
    assert node.look(shown=0) == 0
    assert node.look(share("a", 0)) == 1


def test_pods_of_the_scheduler_cause_no_write() -> None:
    """From the first of the kubelet's two calls to the end of the pod, also if it is deleted before the ledger frees its GPU."""
    node = Node()
    node.look()
    put(node, pod("a", named(0)), pod("w", named(1, 100, BLOCKS * 256)))
    half = allocation("a", ("team", "a"), cores={0: LOW})
    assert node.look(half) == 1
    assert node.look(share("a", 0), whole("w", ("team", "w"), 1)) == 1
    put(node, pod("a", named(0), phase="Succeeded"))
    del node.pods.views["team", "w"]
    assert node.look(share("a", 0), whole("w", ("team", "w"), 1)) == 1
    assert node.look() == 1


def test_an_allocation_that_outlives_its_pod_is_reported() -> None:
    node = Node()
    put(node, pod("a", named(0)))
    node.look(share("a", 0))
    node.pods.views.clear()
    assert node.look(share("a", 0), seconds=ENDING_SECONDS / 2) == 1
    assert node.look(share("a", 0), seconds=ENDING_SECONDS) == 2
    assert node.other == {"uid-a": ((0, 30, 256),)}


def test_what_no_placement_explains_is_reported_by_pod() -> None:
    node = Node()
    put(
        node,
        pod("b"),
        pod("c", named(1)),
        pod("d", named(0, cores=20)),
        pod("e", named(0), side=(named(0),)),
        pod("f", (uuid_of(7), Amounts(30, 256))),
    )
    everyone = [replace(share(letter, 0), device_ids={}) for letter in "bcdefz"]
    for each in everyone:
        node.look(each)
        assert node.other == {f"uid-{each.id}": ((0, 30, 256),)}, each.id
    node.look(replace(share("n", 0), uid=None, pod=None))
    assert node.other == {"n": ((0, 30, 256),)}


def test_all_that_a_pod_holds_is_reported_if_a_part_is_not_explained() -> None:
    """The scheduler then counts this instead of the pod's annotation. An id that two containers have in turn counts once."""
    node = Node()
    put(node, pod("a", named(0)))
    first = replace(share("a", 0), id="1", container="init", init=True)
    second = allocation("a", ("team", "a"), cores={0: LOW << 10}, blocks={0: 0b110})
    node.look(first, second)
    assert node.other == {"uid-a": ((0, 40, 768),)}


def test_mig_devices_are_reported_with_their_places() -> None:
    """The entry of a pod that the scheduler has not placed, or has placed elsewhere on the GPU."""
    node, held = Node(), Amounts(14, 9984, slices=1 << 6)
    there = replace(share("a", 0), device_ids={}, gpus={name_of(0): held})
    put(node, pod("a"))
    node.look(there)
    assert node.other == {"uid-a": ((0, 14, 9984, 1 << 6, 0),)}
    put(node, pod("a", (uuid_of(0), held)))
    node.look(there)
    assert node.other == {}
    put(node, pod("a", (uuid_of(0), replace(held, slices=1))))
    node.look(there)
    assert node.other == {"uid-a": ((0, 14, 9984, 1 << 6, 0),)}


def test_a_whole_gpu_has_all_its_memory_and_a_gpu_that_is_gone_no_place() -> None:
    node = Node()
    pair = allocation("p", ("team", "p"), cores={0: ALL_CORES, 1: ALL_CORES}, blocks={0: 1})
    node.look(pair)
    assert node.other == {"uid-p": ((0, 100, BLOCKS * 256), (1, 100, BLOCKS * 256))}
    node.look(pair, shown=1)
    assert node.other == {"uid-p": ((0, 100, BLOCKS * 256),)}


def test_gpus_with_mig_devices_on_demand_are_open_and_have_their_profiles() -> None:
    node = Node()
    for in_mig_mode in (True, False):
        view = mig_view(in_mig_mode=in_mig_mode, mig_on_demand=["1g.10gb", "3g.40gb"])
        node.reporter.report(replace(node.report, view=view))
        (gpu, _) = node.inventory.gpus
        created = [each.name for each in gpu.mig_profiles if each.starts]
        assert (gpu.cordoned, created, len(gpu.mig_profiles)) == (not in_mig_mode, ["3g.40gb", "1g.10gb"], 6)
    node.look()
    assert [gpu.mig for gpu in node.inventory.gpus] == [UNSET, UNSET]


def test_replicas_are_written_always_and_factors_where_replicas_are_offered() -> None:
    node = Node()
    node.look()
    assert (node.inventory.scaling, [gpu.replicas for gpu in node.inventory.gpus]) == (UNSET, [0, 0])
    view = node.report.view
    node.report = NodeReport(view=replace(view, inventory=replace(view.inventory, replicas=5, scaling=(2.0, 1.5))))
    node.reporter.report(node.report)
    assert (node.inventory.scaling, [gpu.replicas for gpu in node.inventory.gpus]) == ((2.0, 1.5), [5, 5])


def replica(letter: str, replicas: Mapping[int, int], gpus: Mapping[int, Amounts]) -> Allocation:
    """The pod `letter`: its replicas as masks, and its amounts, by GPU."""
    held = {name_of(gpu): mask for gpu, mask in replicas.items()}
    granted = {name_of(gpu): amounts for gpu, amounts in gpus.items()}
    return replace(allocation(letter, ("team", letter)), device_ids={"replica": held}, gpus=granted)


def test_a_pod_of_hamis_scheduler_is_reported_until_it_has_a_placement() -> None:
    """The scheduler does not read HAMi's list of its GPUs."""
    node, main = Node(), ContainerSpec(name="main", replicas=ReplicaRequest(count=1, cores=20, memory_mebibytes=1000))
    theirs = replace(pod("h", named(0, 20, 1000)), containers=(main,), bound_by_hami=True)
    held = replica("h", {0: 1}, {0: Amounts(20, 1000)})
    put(node, theirs)
    node.look(held)
    assert node.other == {"uid-h": ((0, 20, 1000, 0, 1),)}
    put(node, replace(theirs, bound_by_hami=False))
    node.look(held)
    assert node.other == {}


def test_the_replicas_of_each_share_are_reported() -> None:
    """Two containers are on one GPU. HAMi's plugin has put a container on another GPU than the GPU of the kubelet's id. The pod of another
    container is not known, so the scheduler has no request of it."""
    node, first = Node(), replica("h", {0: 0b01}, {0: Amounts(20, 1000)})
    second = replace(replica("h", {0: 0b10}, {0: Amounts(20, 1000)}), id="2", container="side")
    node.look(first, second)
    assert node.other == {"uid-h": ((0, 40, 2000, 0, 2),)}
    node.look(replica("h", {0: 0b01}, {1: Amounts(20, 1000)}))
    assert node.other == {"uid-h": ((0, 0, 0, 0, 1), (1, 20, 1000))}
    node.look(replace(replica("gone", {0: 0b01}, {0: Amounts(20, 1000)}), uid=None))
    assert [[share.replicas for share in shares] for shares in node.inventory.other.values()] == [[1]]
    node.look(share("vcuda", 0))
    assert not any(share.replicas for shares in node.inventory.other.values() for share in shares)


def test_a_pod_that_was_resized_to_more_is_reported_with_all_that_it_holds() -> None:
    node = Node()
    put(node, pod("a", named(0)))
    held = share("a", 0)
    assert node.look(held) == 1
    assert not node.other
    grown = {name_of(0): Amounts(45, 512)}
    node.look(replace(held, resize=Resize(asked=ResizeRequest(cores=45), amounts=grown)))
    assert node.other == {"uid-a": ((0, 45, 512),)}
    node.look(replace(held, resize=Resize(asked=ResizeRequest(cores=10), amounts={name_of(0): Amounts(10, 256)})))
    assert not node.other, "the kubelet's ids stay with it"
