"""The tree with who sits where, in the cases that a healthy node doesn't show."""

from gpumgr.agent.inventory import Inventory
from gpumgr.agent.writer import AgentView
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Ledger
from gpumgr.web.graph import graph_data, graph_text
from tests.unit.web.metrics.pictures import allocation, name_of, uuid_of, view_of


def test_a_cordoned_or_unhealthy_gpu_shows_the_reason_and_is_not_free() -> None:
    view = view_of(failed={uuid_of(0): "XID 79: the GPU has fallen off the bus"})
    assert graph_text(view).splitlines() == [
        "ROOT:1:0",
        "|--PHB:1:0",
        "|  |--GPU0:0:1",
        f"|  |     NVIDIA A10, {uuid_of(0)}: 100 of 100 cores and 8 of 8 memory blocks free",
        "|  |     takes nothing new: XID 79: the GPU has fallen off the bus",
        "|  |--GPU1:1:1",
        f"|  |     NVIDIA A10, {uuid_of(1)}: 100 of 100 cores and 8 of 8 memory blocks free",
    ]


def test_a_gpu_that_the_driver_lost_stands_at_the_end_with_its_holders() -> None:
    view = view_of(allocation("a", ("team", "share"), cores={1: 0b11}, blocks={1: 0b1}), shown=1)
    assert graph_text(view).splitlines()[-4:] == [
        f"GPU {name_of(1)} (not in the tree)",
        f"   {uuid_of(1)}: 98 of 100 cores and 7 of 8 memory blocks free",
        "   takes nothing new: the driver does not list it",
        "   team/share/main: 2 cores, 1 memory blocks",
    ]
    missing = graph_data(view)["gpus"][1]
    assert (missing["uuid"], missing["row"], missing["index"]) == (uuid_of(1), None, None)
    assert missing["takes_nothing_new"] == "the driver does not list it"


def test_gpus_are_numbered_as_the_driver_counts_also_after_one_that_it_can_not_describe() -> None:
    view = view_of(allocation("a", ("team", "share"), cores={2: 0b1}), count=3, broken=[1])
    lines = graph_text(view).splitlines()
    assert lines[:3] == ["ROOT:1:0", "|--PHB:1:0", "|  |--GPU0:1:1"]
    assert lines[4] == "|  |--GPU2:0:1"
    assert uuid_of(2) in lines[5]
    assert lines[7] == f"GPU {name_of(1)} (not in the tree)"
    data = graph_data(view)
    leaf = data["tree"]["children"][0]["children"][1]
    assert (leaf["name"], leaf["gpus"]) == ("GPU2", [1])
    assert [(gpu["row"], gpu["index"]) for gpu in data["gpus"] if gpu["uuid"] == uuid_of(2)] == [(1, 2)]


def test_holders_are_listed_oldest_first_with_their_known_names() -> None:
    view = view_of(
        allocation("c", None, container=None, cores={0: 0b100}),
        allocation("b", ("team", "share"), container=None, cores={0: 0b10}),
        allocation("a", ("team", "share"), container="prepare", init=True, cores={0: 0b1}),
        count=1,
    )
    assert [line.strip("| ") for line in graph_text(view).splitlines()[-3:]] == [
        "team/share/prepare (init): 1 cores, 0 memory blocks",
        "team/share: 1 cores, 0 memory blocks",
        "pod uid uid-c: 1 cores, 0 memory blocks",
    ]
    (gpu,) = graph_data(view)["gpus"]
    assert [(h.namespace, h.pod, h.container, h.init) for h in gpu["holders"]] == [
        ("team", "share", "prepare", True),
        ("team", "share", None, False),
        (None, None, None, False),
    ]


def test_a_node_without_gpus() -> None:
    gpu_registry, inventory = GpuRegistry(), Inventory()
    view = AgentView(ledger=Ledger(gpu_registry), inventory=inventory, node=inventory.view(gpu_registry))
    assert graph_text(view) == "ROOT:0:0\n"
    data = graph_data(view)
    assert data["tree"]["children"] == []
    assert data["driver_version"] is None
