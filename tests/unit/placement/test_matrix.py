"""Reading topo -m text and matrices: real dumps, and every way in which text can be wrong."""

from pathlib import Path

import pytest

from gpumgr.common.errors import InputError
from gpumgr.placement.devices import Level, Link
from gpumgr.placement.matrix import Nic, parse_topology
from gpumgr.placement.tree import matrix_cells
from tests.topologies import topology_from_matrix

DATA = Path(__file__).parents[2] / "data"
TOPO = DATA / "topo"


def read(name: str) -> str:
    return (TOPO / name).read_text()


@pytest.mark.parametrize("path", sorted(TOPO.glob("*.txt")), ids=lambda path: path.stem)
def test_a_real_dump_reads_back_from_its_own_cells(path: Path) -> None:
    parsed = parse_topology(path.read_text())
    assert topology_from_matrix(matrix_cells(parsed.topology)) == parsed.topology
    assert parsed.labels == tuple(f"GPU{row}" for row in range(len(parsed.topology)))


def test_old_spelling_soc_is_sys() -> None:
    topology = parse_topology(read("soc-4.txt")).topology
    assert topology.link(0, 1) == Link(level=Level.PHB)
    assert topology.link(0, 2) == Link(level=Level.SYS)


def test_nics_are_no_gpus_and_have_the_nearest_gpus() -> None:
    parsed = parse_topology(read("nics-8.txt"))
    assert len(parsed.topology) == 8
    assert parsed.nics == (Nic(name="NIC0", nearest=(6,)), Nic(name="NIC1", nearest=(6,)))
    assert parsed.numa_affinity == (0, 0, 0, 0, 1, 1, 1, 1)


def test_an_unknown_numa_node_is_none() -> None:
    assert parse_topology(read("numa-unknown-2.txt")).numa_affinity == (None, 1)


def test_nvlinks_hide_the_level_and_count_as_sys() -> None:
    parsed = parse_topology(read("dgx1-volta.txt"))
    assert parsed.topology.link(0, 3) == Link(level=Level.SYS, nvlinks=2)
    assert parsed.topology.link(0, 5) == Link(level=Level.SYS)
    assert [(nic.name, nic.nearest) for nic in parsed.nics] == [
        ("mlx5_0", (0, 1)),
        ("mlx5_2", (4, 5)),
        ("mlx5_1", (2, 3)),
        ("mlx5_3", (6, 7)),
    ]


def test_names_and_cells_without_separators_are_split() -> None:
    parsed = parse_topology(read("dgx1-pascal-glued.txt"))
    assert len(parsed.topology) == 8
    assert parsed.nics[0] == Nic(name="mlx5_0", nearest=(0, 1))
    text = "\tGPU0\tGPU1\tNIC0\tNIC1NIC2\tCPU Affinity\nGPU0\t X \tNV18\tPXB\tNODENODE\t0-1\nGPU1\tNV18\t X \tNODE\tNODEPXB\t0-1"
    assert [nic.nearest for nic in parse_topology(text).nics] == [(0,), (0, 1), (1,)]


def test_escapes_of_the_underlined_header_are_removed() -> None:
    text = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m\r\nGPU0\t X \tPIX\t0-7\t0\r\nGPU1\tPIX\t X \t0-7\t0\r\n"
    parsed = parse_topology(text)
    assert parsed.topology.link(0, 1) == Link(level=Level.PIX)
    assert parsed.numa_affinity == (0, 0)


def test_blank_affinity_stays_unknown() -> None:
    assert parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\n").numa_affinity == (None,)


def test_a_single_gpu_with_a_small_x() -> None:
    assert len(parse_topology(" GPU0\nGPU0   x").topology) == 1


def test_a_second_table_below_the_legend_is_left_alone() -> None:
    parsed = parse_topology(read("soc-4.txt") + "\n\tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n")
    assert len(parsed.topology) == 4


def test_matrix_cells_with_both_links_and_level() -> None:
    topology = topology_from_matrix([["X", "NV18+NODE", "NV4"], ["NV18+NODE", "X", "N/A"], ["NV4", "N/A", "X"]])
    assert topology.link(0, 1) == Link(level=Level.NODE, nvlinks=18)
    assert topology.link(0, 2) == Link(level=Level.SYS, nvlinks=4)
    assert topology.link(1, 2) == Link(level=Level.SYS)


HEADER = "\tGPU0\tGPU1\n"
TWO = HEADER + "GPU0\t X \tPIX\nGPU1\tPIX\t X \n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no header"]),
        ("hello\nworld", ["no header"]),
        (HEADER, ["ends before the row of GPU0"]),
        (HEADER + "GPU0 X PIX", ["ends before the row of GPU1"]),
        (HEADER + "GPU0 X PIX\nGPU2 PIX X", ["line 3", "GPU1 is expected"]),
        (TWO + "GPU2 X X X", ["line 4", "GPU2", "2 GPUs"]),
        (HEADER + "GPU0 X FOO\nGPU1 FOO X", ["line 2, column 2 (GPU1)", "'FOO'", "allowed", "NODE"]),
        (HEADER + "GPU0 X pix\nGPU1 pix X", ["'pix'"]),
        (HEADER + "GPU0 X NV0\nGPU1 NV0 X", ["'NV0'"]),
        (HEADER + "GPU0 X NV1+FOO\nGPU1 NV1+FOO X", ["NV1+FOO"]),
        (HEADER + "GPU0 X X\nGPU1 X X", ["line 2, column 2 (GPU1)"]),
        (HEADER + "GPU0 PIX PIX\nGPU1 PIX X", ["line 2, column 1 (GPU0)", "expected X"]),
        (HEADER + "GPU0 X PIX\nGPU1 SYS X", ["not symmetric", "GPU0 to GPU1 is PIX (line 2)", "GPU1 to GPU0 is SYS (line 3)"]),
        (HEADER + "GPU0 X NV2\nGPU1 NV1 X", ["not symmetric", "NV2", "NV1"]),
        (HEADER + "GPU0 X\nGPU1 PIX X", ["line 2", "1 cells", "2"]),
        (HEADER + "GPU0 X PIX PIX\nGPU1 PIX X", ["line 2", "3 cells"]),
        ("GPU0 GPU2\nGPU0 X PIX", ["line 1, column 2", "GPU2", "GPU1 is expected"]),
        ("GPU0 GPU0\nGPU0 X PIX", ["line 1, column 2"]),
        ("GPU0 X\nGPU0 X PIX", ["line 1, column 2", "'X'"]),
        ("GPU0 NIC0 NIC0\nGPU0 X PIX PIX", ["line 1", "NIC0"]),
        ("\t" + "\t".join(f"GPU{n}" for n in range(65)), ["65 GPUs", "64"]),
    ],
)
def test_malformed_text_is_refused_with_its_place(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_topology(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
