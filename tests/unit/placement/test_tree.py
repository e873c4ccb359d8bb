"""The tree, its printed form, and the table of driver quirks."""

from pathlib import Path

import pytest

from gpumgr.driver.snapshot import level_of
from gpumgr.placement.devices import Level, Topology
from gpumgr.placement.matrix import parse_topology
from gpumgr.placement.tree import build_tree, enclosing_group, fragment_choice, render_matrix, render_tree, tree_data
from tests.topologies import topology_from_matrix

DATA = Path(__file__).parents[2] / "data"
CONFORMANCE = DATA / "conformance"


def dump(name: str) -> Topology:
    return parse_topology((DATA / "topo" / name).read_text()).topology


def test_free_gpus_are_counted_in_each_group() -> None:
    topology = parse_topology((CONFORMANCE / "topo_seven_3_4.txt").read_text()).topology
    lines = render_tree(topology, free=0b1111110).splitlines()
    assert lines[:4] == ["ROOT:6:0", "|--PHB:6:0", "|  |--PIX:2:0", "|  |  |--GPU0:0:1"]


def test_a_lone_gpu_beside_groups_shares_the_rank_of_the_group_that_ends_with_its_parent() -> None:
    assert render_tree(dump("node-5.txt")).splitlines() == [
        "ROOT:5:0",
        "|--SYS:5:0",
        "|  |--GPU0:1:2",
        "|  |--NODE:4:0",
        "|  |  |--PHB:2:0",
        "|  |  |  |--GPU1:1:1",
        "|  |  |  |--GPU2:1:1",
        "|  |  |--PHB:2:0",
        "|  |  |  |--GPU3:1:2",
        "|  |  |  |--GPU4:1:2",
    ]


def test_one_gpu_is_a_child_of_the_root() -> None:
    assert render_tree(topology_from_matrix([["X"]])) == "ROOT:1:0\n|--GPU0:1:1"


def test_no_gpu_gives_a_root_without_children() -> None:
    empty = Topology(levels=(), nvlinks=())
    assert render_tree(empty) == "ROOT:0:0"
    assert fragment_choice(build_tree(empty), 0, 0) is None


def test_components_are_transitive_where_levels_are_not() -> None:
    topology = topology_from_matrix([["X", "PIX", "PHB"], ["PIX", "X", "PIX"], ["PHB", "PIX", "X"]])
    assert [line.split(":")[0] for line in render_tree(topology).splitlines()] == [
        "ROOT",
        "|--PIX",
        "|  |--GPU0",
        "|  |--GPU1",
        "|  |--GPU2",
    ]


def test_groups_may_interleave() -> None:
    rows = [["X", "SYS", "PIX", "SYS"], ["SYS", "X", "SYS", "PIX"], ["PIX", "SYS", "X", "SYS"], ["SYS", "PIX", "SYS", "X"]]
    tree = build_tree(topology_from_matrix(rows))
    assert enclosing_group(tree, 0b0101).level == Level.PIX
    assert enclosing_group(tree, 0b0011).level == Level.SYS
    assert fragment_choice(tree, 0b1111, 0b1111) == 0
    assert fragment_choice(tree, 0b1110, 0b1110) == 2  # GPU2's pair is broken already
    assert fragment_choice(tree, 0b0110, 0b0110) == 1  # both pairs are: the lowest free index


def test_tree_data_nests_what_the_text_prints() -> None:
    data = tree_data(topology_from_matrix([["X", "PIX"], ["PIX", "X"]]), labels=["GPU4", "GPU7"])
    pair = data["children"][0]
    assert (pair["name"], pair["gpus"], pair["free"], pair["cost"]) == ("PIX", [0, 1], 2, 0)
    assert [child["name"] for child in pair["children"]] == ["GPU4", "GPU7"]


def test_the_printed_matrix_reads_back() -> None:
    topology = topology_from_matrix([["X", "NV18+NODE"], ["NV18+NODE", "X"]])
    text = render_matrix(topology, ["GPU0", "GPU1"], [0, None])
    assert parse_topology(text).topology == topology
    assert parse_topology(text).numa_affinity == (0, None)


@pytest.mark.parametrize(
    ("driver", "number", "same_board", "level"),
    [
        ("550.54.15", 0, True, Level.PSB),
        ("550.54.15", 0, None, Level.PSB),
        (None, 0, None, Level.PSB),
        ("396.26", 0, True, Level.PIX),
        ("396.26", 0, None, Level.PIX),
        ("396.44", 0, True, Level.PSB),
        ("550.54.15", 0, False, Level.PIX),
        ("396.26", 10, True, Level.PIX),
        ("396.26", 20, True, Level.PXB),
        (None, 10, None, Level.PIX),
        (None, 20, None, Level.PXB),
        (None, 30, None, Level.PHB),
        (None, 40, None, Level.NODE),
        (None, 50, None, Level.SYS),
        (None, 35, None, Level.NODE),
        (None, 60, None, Level.SYS),
    ],
)
def test_what_nvml_levels_mean(driver: str | None, number: int, same_board: bool | None, level: Level) -> None:
    assert level_of(driver, number, same_board) == level
