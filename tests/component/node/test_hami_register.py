"""The annotations by which HAMi's scheduler knows the node: their content, and when they are written."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import Amounts
from gpumgr.kube.hami_formats import REGISTER, SCORES
from gpumgr.kube.publisher.hami import register
from gpumgr.ledger.ledger import Allocation, Resize
from gpumgr.placement.pods import ResizeRequest
from tests.component.stage.mig import MEBIBYTES as MIG_MEBIBYTES
from tests.component.stage.stage import MemoryPods
from tests.unit.web.metrics.pictures import BLOCKS, allocation, name_of, uuid_of, view_of, whole

from .test_inventory import LOW, mig_view, pod

MEBIBYTES = 256 * BLOCKS


@dataclass
class Node:
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    pods: MemoryPods = field(default_factory=MemoryPods)
    written: list[tuple[str, str]] = field(default_factory=list)

    def _annotate(self, key: str, value: str) -> None:
        if dict(self.written).get(key) != value:
            self.written.append((key, value))

    def look(self, *allocations: Allocation, **view: Any) -> list[str]:
        """The keys that are written with this state."""
        return self.offer(view_of(*allocations, **view))

    def offer(self, view: AgentView) -> list[str]:
        scaling = self.memory_scaling, self.core_scaling
        report = NodeReport(view=replace(view, inventory=replace(view.inventory, replicas=10, scaling=scaling)))
        before = len(self.written)
        register(self._annotate, self.pods, report)
        return [key for key, _ in self.written[before:]]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        text = next(text for key, text in reversed(self.written) if key == REGISTER)
        found: list[dict[str, Any]] = json.loads(text or "[]")
        return found


@pytest.mark.hami_bug(
    "B5, B21: a failed write is never repeated; the order changes at random; pair scores are published for one setting only"
)
def test_every_gpu_is_registered_once_in_the_order_of_the_driver() -> None:
    node = Node()
    assert node.look() == [REGISTER, SCORES]
    assert [gpu["id"] for gpu in node.gpus] == [uuid_of(0), uuid_of(1)]
    assert node.gpus[1] | {"type": ""} == {
        "id": uuid_of(1), "index": 1, "count": 10, "devmem": MEBIBYTES, "devcore": 100, "type": "", "numa": 1,
        "mode": "hami-core", "health": True,
    }  # fmt: skip
    assert node.look() == []


def test_what_vcuda_pods_hold_is_subtracted() -> None:
    node = Node(memory_scaling=2.0)
    node.look(allocation("a", ("team", "a"), cores={0: LOW}, blocks={0: 0b1111}))
    assert (node.gpus[0]["devmem"], node.gpus[0]["devcore"]) == (2 * (MEBIBYTES - 1024), 70)
    assert (node.gpus[1]["devmem"], node.gpus[1]["devcore"]) == (2 * MEBIBYTES, 100)
    node.look(whole("w", ("team", "w"), 0))
    assert "health" not in node.gpus[0]
    assert node.gpus[1]["health"]


def test_pods_of_hamis_scheduler_are_counted_by_it() -> None:
    node = Node()
    held = replace(allocation("h", ("team", "h")), device_ids={"replica": {name_of(0): 1}}, gpus={name_of(0): Amounts(20, 1000)})
    node.look(held)
    assert (node.gpus[0]["count"], node.gpus[0]["devmem"], node.gpus[0]["devcore"]) == (9, MEBIBYTES - 1000, 80)
    node.pods.views = {("team", "h"): replace(pod("h"), bound_by_hami=True)}
    node.look(replace(held, uid="uid-h"))
    assert (node.gpus[0]["count"], node.gpus[0]["devmem"], node.gpus[0]["devcore"]) == (10, MEBIBYTES, 100)
    grown = Resize(asked=ResizeRequest(cores=50), amounts={name_of(0): Amounts(50, 900)})
    node.look(replace(held, uid="uid-h", resize=grown))
    assert (node.gpus[0]["devmem"], node.gpus[0]["devcore"]) == (MEBIBYTES, 70), "it counts 20 cores and 1000 MiB itself"


def test_a_gpu_that_others_share_is_offered_to_no_exclusive_pod() -> None:
    """HAMi's scheduler gives one a GPU with 100 cores on which none of its own pods is; the agent refuses it beside another pod."""
    node = Node(core_scaling=2.0)
    held = replace(allocation("h", ("team", "h")), device_ids={"replica": {name_of(0): 1}}, gpus={name_of(0): Amounts(0, 1000)})
    node.look(held)
    assert [gpu["devcore"] for gpu in node.gpus] == [99, 200]
    node.look(allocation("a", ("team", "a"), cores={0: LOW}, blocks={0: 0b1111}))
    assert [gpu["devcore"] for gpu in node.gpus] == [99, 200]


@pytest.mark.hami_bug("B3: one sick GPU removes the node")
def test_a_sick_or_cordoned_gpu_stays_listed_beside_the_others() -> None:
    node = Node()
    node.look(failed={uuid_of(0): "XID 79"}, cordoned={uuid_of(1): "by hand"})
    assert [gpu.get("health") for gpu in node.gpus] == [None, None]
    node.look()
    assert [gpu["health"] for gpu in node.gpus] == [True, True]


def test_gpus_with_mig_devices_on_demand_are_registered_with_their_profiles_and_free_places() -> None:
    node = Node(memory_scaling=2.0)
    node.offer(mig_view(mig_on_demand=()))
    gpu = node.gpus[0]
    assert (gpu["mode"], gpu["count"], gpu["devmem"], gpu["devcore"], gpu["health"]) == ("mig", 7, MIG_MEBIBYTES, 100, True)
    profiles = {each["name"]: each for each in gpu["migProfiles"]}
    assert profiles["3g.40gb"] == {
        "name": "3g.40gb", "memoryMB": 40448, "core": 42, "sliceCount": 3,
        "placements": [{"start": 0, "size": 4}, {"start": 4, "size": 4}],
    }  # fmt: skip
    node.offer(mig_view(mig_on_demand=(), mig_blocked={uuid_of(0): 0b1111_0000}))
    profiles = {each["name"]: each["placements"] for each in node.gpus[0]["migProfiles"]}
    assert (profiles["3g.40gb"], "7g.80gb" in profiles) == ([{"start": 0, "size": 4}], False)
    assert node.gpus[0]["count"] == 4
    assert node.gpus[1]["count"] == 7
