"""What the node shows of its GPUs, out of the picture that all readers see."""

from dataclasses import dataclass, field, replace
from typing import Any

from gpumgr.agent.cordons import Cordon
from gpumgr.agent.picture import Picture
from gpumgr.allocator.quarantine import Quarantine
from gpumgr.app.describing import PATIENCE_SECONDS, Describing
from gpumgr.kubeapi.writer.condition import NO_CONDITION, Condition
from tests.component.stage.stage import Clock
from tests.unit.metrics.pictures import name_of, uuid_of, view_of

ZERO, ONE = "GPU0 (00000000)", "GPU1 (00000001)"
WELL = Condition(trouble=False, reason="GpusWork", message="2 GPUs, none in trouble")
AWAY = "the driver's library does not answer"
UNREGISTERED = "core is not registered with the kubelet"


@dataclass
class NodeSide:
    """What the writer was told last, and how often."""

    labels: list[dict[str, str]] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)

    def label_node(self, labels: dict[str, str]) -> None:
        self.labels.append(labels)

    def tell_condition(self, condition: Condition) -> None:
        self.conditions.append(condition)


class Node:
    def __init__(self, picture: Picture, **settings: Any) -> None:
        self.side, self.clock, self.picture = NodeSide(), Clock(), picture
        self._describe = Describing(self.side, picture=lambda: self.picture, clock=self.clock, **settings)

    def condition(self, **changes: Any) -> Condition:
        """After one more second with these changes."""
        self.picture = replace(self.picture, **changes)
        self.look()
        return self.side.conditions[-1]

    def look(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self._describe()


def up(**changes: Any) -> Picture:
    return replace(Picture(view=view_of(), nvml_up=True), **changes)


def test_a_node_that_is_well_says_so_and_is_labelled() -> None:
    node = Node(up())
    node.look()
    assert node.side.conditions == [WELL]
    assert node.side.labels[0]["nvidia.com/gpu.product"] == "NVIDIA-A10"
    node.look()
    assert node.side.labels[1] is node.side.labels[0]


def test_each_trouble_is_told_with_its_gpu_the_weightiest_first() -> None:
    node = Node(up(view=view_of(failed={uuid_of(1): "XID 79"})))
    cordons = {uuid_of(0): Cordon(reason="swap the fan"), uuid_of(1): Cordon()}
    told = node.condition(cordons=cordons)
    assert (told.trouble, told.reason) == (True, "GpuUnhealthy")
    assert told.message == f"{ONE}: XID 79; {ZERO} is cordoned: swap the fan; {ONE} is cordoned"
    told = node.condition(view=view_of(closed={uuid_of(0): "cordoned"}))
    assert (told.reason, told.message) == ("GpuCordoned", f"{ZERO} is cordoned: swap the fan; {ONE} is cordoned")
    assert node.condition(cordons={}, view=view_of()) == WELL


def test_a_gpu_that_the_driver_does_not_show_is_trouble() -> None:
    told = Node(up(view=view_of(shown=1))).condition()
    assert told.message == "GPU 00000001: the driver does not show it"


def test_a_gpu_that_was_broken_before_anybody_knew_it_is_trouble() -> None:
    told = Node(up(view=view_of(broken=[1], known=[0]))).condition()
    assert (told.trouble, told.reason, told.message) == (True, "GpuUnhealthy", "GPU1 can't be described: GPU is lost")


def test_the_gist_tells_gpus_and_words_from_counts_and_an_operators_words_are_his() -> None:
    def gist(**changes: Any) -> str:
        return Node(up()).condition(**changes).gist

    count, more = (gist(view=view_of(failed={uuid_of(1): f"{n} uncorrectable memory errors"})) for n in (2, 3))
    assert count == more
    other = gist(view=view_of(failed={uuid_of(0): "2 uncorrectable memory errors"}))
    both = gist(view=view_of(failed={uuid_of(n): "2 uncorrectable memory errors" for n in (0, 1)}))
    xids = [gist(view=view_of(failed={uuid_of(1): f"XID {n}"})) for n in (48, 79)]
    reasons = [gist(cordons={uuid_of(0): Cordon(reason=f"ticket {n}")}) for n in (1, 2)]
    every = [count, other, both, *xids, *reasons]
    assert len(set(every)) == len(every)


def test_what_passes_by_itself_or_was_wished_is_no_trouble() -> None:
    busy = Quarantine(held={name_of(0): frozenset({(7, 70)})})
    held = up(view=view_of(quarantine=busy, closed={uuid_of(1): "by the operator"}), reasons={uuid_of(1): "operator"})
    assert Node(held).condition() == WELL


def test_a_gpu_that_is_split_by_mig_is_no_trouble() -> None:
    split = up(view=view_of(closed={uuid_of(1): "MIG is enabled"}), reasons={uuid_of(1): "mig"})
    assert Node(split).condition() == WELL


def test_a_driver_that_is_away_for_a_moment_is_no_trouble_of_its_gpus() -> None:
    node = Node(up())
    node.look()
    gone = view_of(failed={uuid_of(0): AWAY, uuid_of(1): AWAY})
    reasons = {uuid_of(0): "nvml_down", uuid_of(1): "nvml_down"}
    told = node.condition(nvml_up=False, not_ready=(AWAY,), view=gone, reasons=reasons)
    assert told == WELL
    assert node.condition(nvml_up=True, not_ready=(), view=view_of(), reasons={}) == WELL


def test_a_start_is_waited_for_and_a_kubelet_that_restarts_is_no_trouble() -> None:
    node = Node(up(nvml_up=False, not_ready=("no driver was found yet", UNREGISTERED)))
    node.look()
    assert (node.side.conditions, node.side.labels) == ([], [])
    assert node.condition(nvml_up=True, not_ready=()) == WELL
    assert node.condition(not_ready=(UNREGISTERED,)) == WELL
    node.look(PATIENCE_SECONDS - 2)
    assert node.side.conditions[-1] == WELL
    node.look()
    told = node.condition()
    assert (told.trouble, told.reason, told.message) == (True, "NotRegistered", UNREGISTERED)


def test_a_driver_that_is_away_is_the_whole_story_and_its_labels_stay() -> None:
    node = Node(up(nvml_up=False, not_ready=(AWAY,), view=view_of(failed={uuid_of(0): AWAY, uuid_of(1): AWAY})))
    node.look()
    node.look(PATIENCE_SECONDS)
    assert node.side.conditions == [Condition(trouble=True, reason="DriverAway", message=AWAY)]
    assert node.side.labels == []


def test_what_is_switched_off_is_taken_away_once_and_the_operators_labels_are_told() -> None:
    silent = Node(up(nvml_up=False), describe_node=False)
    silent.look()
    silent.look()
    assert (silent.side.conditions, silent.side.labels) == ([NO_CONDITION], [{}])
    labelled = Node(up(), describe_node=False, node_labels=("zone=a",))
    labelled.look()
    labelled.look()
    assert (labelled.side.conditions, labelled.side.labels) == ([NO_CONDITION], [{"zone": "a"}] * 2)
