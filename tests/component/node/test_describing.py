"""The node's labels and condition, from the report that all readers get."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.api import Cordon
from gpumgr.agent.node_report import NodeReport
from gpumgr.kube.publisher.node_reporter import PATIENCE_SECONDS, NodeReporter, report_node
from gpumgr.kube.publisher.objects import Condition
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.quarantine import Quarantine
from tests.component.stage.stage import Clock
from tests.unit.web.metrics.pictures import name_of, uuid_of, view_of

ZERO, ONE = "GPU0 (00000000)", "GPU1 (00000001)"
HEALTHY = Condition(trouble=False, reason="GpusWork", message="2 GPUs, none in trouble")
AWAY = "the driver's library does not answer"
UNREGISTERED = "tencent.com/vcuda-core is not registered with the kubelet"


@dataclass
class RecordedNode:
    """The calls of the reporter."""

    labels: list[Mapping[str, str]] = field(default_factory=list)
    conditions: list[Condition | None] = field(default_factory=list)

    def label(self, labels: Mapping[str, str]) -> None:
        self.labels.append(labels)

    def set_condition(self, condition: Condition | None) -> None:
        self.conditions.append(condition)


class Node:
    def __init__(self, report: NodeReport, *, describe_node: bool = True, node_labels: tuple[str, ...] = ()) -> None:
        self.side, self.clock, self.report = RecordedNode(), Clock(), report
        self._reporter = NodeReporter(cast(Publisher, self.side), clock=self.clock)
        self._reporter.switch(describe_node=describe_node, node_labels=node_labels)

    def condition(self, **changes: Any) -> Condition:
        """The condition one second later, with these changes."""
        self.report = replace(self.report, **changes)
        self.look()
        condition = self.side.conditions[-1]
        assert condition is not None
        return condition

    def look(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self._reporter.report(self.report)


def up(**changes: Any) -> NodeReport:
    return replace(NodeReport(view=view_of(), nvml_up=True), **changes)


def test_a_healthy_node_is_labelled_and_has_no_trouble() -> None:
    node = Node(up())
    node.look()
    assert node.side.conditions == [HEALTHY]
    assert node.side.labels[0]["nvidia.com/gpu.product"] == "NVIDIA-A10"


def test_each_trouble_names_its_gpu_the_most_severe_first() -> None:
    node = Node(up(view=view_of(failed={uuid_of(1): "XID 79"})))
    cordons = {uuid_of(0): Cordon(reason="swap the fan"), uuid_of(1): Cordon()}
    condition = node.condition(cordons=cordons)
    assert (condition.trouble, condition.reason) == (True, "GpuUnhealthy")
    assert condition.message == f"{ONE}: XID 79; {ZERO} is cordoned: swap the fan; {ONE} is cordoned"
    condition = node.condition(view=view_of(cordoned={uuid_of(0): "cordoned"}))
    assert (condition.reason, condition.message) == ("GpuCordoned", f"{ZERO} is cordoned: swap the fan; {ONE} is cordoned")
    assert node.condition(cordons={}, view=view_of()) == HEALTHY


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ({"shown": 1}, "GPU 00000001: the driver does not list it"),
        ({"broken": [1], "known": [0]}, "GPU1 can't be described: GPU is lost"),
    ],
)
def test_a_gpu_that_is_not_listed_or_was_never_readable_is_trouble(gpus: dict[str, Any], message: str) -> None:
    expected = Condition(trouble=True, reason="GpuUnhealthy", message=message)
    assert Node(up(view=view_of(**gpus))).condition() == expected


def test_quarantine_and_cordons_by_the_operator_are_no_trouble() -> None:
    busy = Quarantine(held={name_of(0): frozenset({(7, 70)})})
    held = up(view=view_of(quarantine=busy, cordoned={uuid_of(1): "by the operator"}), reasons={uuid_of(1): "operator"})
    assert Node(held).condition() == HEALTHY


def test_a_start_and_a_restart_of_the_kubelet_are_no_trouble() -> None:
    node = Node(up(nvml_up=False, not_ready=("no driver was found yet", UNREGISTERED)))
    node.look()
    assert (node.side.conditions, node.side.labels) == ([], [])
    assert node.condition(nvml_up=True, not_ready=()) == HEALTHY
    assert node.condition(not_ready=(UNREGISTERED,)) == HEALTHY
    node.look(PATIENCE_SECONDS - 2)
    assert node.side.conditions[-1] == HEALTHY
    node.look()
    condition = node.condition()
    assert (condition.trouble, condition.reason, condition.message) == (True, "NotRegistered", UNREGISTERED)


def test_without_the_driver_that_is_the_only_trouble_and_the_labels_stay() -> None:
    node = Node(up(nvml_up=False, not_ready=(AWAY,), view=view_of(failed={uuid_of(0): AWAY, uuid_of(1): AWAY})))
    node.look()
    node.look(PATIENCE_SECONDS)
    assert node.side.conditions == [Condition(trouble=True, reason="DriverAway", message=AWAY)]
    assert node.side.labels == []


def test_what_is_switched_off_is_removed_and_the_operators_labels_stay() -> None:
    silent = Node(up(nvml_up=False), describe_node=False)
    silent.look()
    assert (silent.side.conditions, silent.side.labels) == ([None], [{}])
    labelled = Node(up(), describe_node=False, node_labels=("zone=a",))
    labelled.look()
    assert (labelled.side.conditions, labelled.side.labels) == ([None], [{"zone": "a"}])


async def test_a_bug_of_one_reporter_does_not_stop_the_others() -> None:
    passed = asyncio.Queue[NodeReport]()

    def broken(_: NodeReport) -> None:
        raise LookupError("a bug")

    with capture_logs() as logs:
        daemon = asyncio.create_task(report_node(up, {"broken": broken, "sound": passed.put_nowait}))
        for _ in range(2):
            assert (await passed.get()).nvml_up
        daemon.cancel()
    assert [line["daemon"] for line in logs if line["event"] == "daemon_failed"] == ["broken"]
