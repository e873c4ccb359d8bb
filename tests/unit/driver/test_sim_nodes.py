from pathlib import Path

import pytest

from gpumgr.common.errors import SettingsError
from gpumgr.sim.nodes import (
    HOSTBRIDGE,
    INTERNAL,
    MULTIPLE,
    NODE,
    SINGLE,
    SYSTEM,
    NodeDescription,
    load_node,
)

HEAD = """
about: a test
driver_version: 535.183.01
cuda_version: 12.2
models:
  t4: {model: Tesla T4, memory_mib: 15360}
"""


def described(tmp_path: Path, body: str) -> NodeDescription:
    path = tmp_path / "node.yaml"
    path.write_text(HEAD + body)
    return load_node(str(path))


def test_levels_follow_from_boards_parents_and_numa_nodes(tmp_path: Path) -> None:
    node = described(
        tmp_path,
        """
gpus:
  - {model: t4, bus_id: 0000:05:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0, 0000:02:00.0, 0000:03:04.0], board: k80}
  - {model: t4, bus_id: 0000:06:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0, 0000:02:00.0, 0000:03:08.0], board: k80}
  - {model: t4, bus_id: 0000:07:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0, 0000:02:00.0, 0000:03:0c.0]}
  - {model: t4, bus_id: 0000:09:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:02.0, 0000:02:00.0, 0000:03:10.0, 0000:08:00.0]}
  - {model: t4, bus_id: 0000:0a:00.0, numa_node: 0, pcie: [pci0000:00, 0000:00:03.0]}
  - {model: t4, bus_id: 0000:21:00.0, numa_node: 0, pcie: [pci0000:20]}
  - {model: t4, bus_id: 0000:81:00.0, numa_node: 1, pcie: [pci0000:80]}
  - {model: t4, bus_id: 0000:91:00.0, pcie: [pci0000:90]}
  - {model: t4, bus_id: 0000:92:00.0, pcie: [pci0000:a0]}
""",
    )
    assert [node.nvml_level(0, other) for other in range(1, 8)] == [INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM, SYSTEM]
    assert node.nvml_level(7, 8) == NODE


def test_the_places_of_mig_devices(tmp_path: Path) -> None:
    model = "  a100: {model: A100, memory_mib: 40960, mig: enabled}\n"
    cut = ("[1c.3g.20gb, 4g.20gb]", "[3g.20gb, 2g.10gb, 1g.5gb+me, 1g.5gb]", "[4g.20gb, 4g.20gb]", "[1g.6gb, 7g.40gb]")
    gpus = [f"  - {{model: a100, bus_id: 0000:0{n}:00.0, pcie: [a], mig_instances: {each}}}\n" for n, each in enumerate(cut)]
    node = described(tmp_path, f"{model}gpus:\n{''.join(gpus)}")
    assert [[each.memory_slices for each in node.mig_instances_of(n)] for n in range(4)] == [
        [0b11110000, 0b1111],
        [0b11110000, 0b11, 0b100, 0b1000],
        [0, 0],
        [0, 0b11111111],
    ]


GPU = "{model: t4, bus_id: 0000:05:00.0, pcie: [pci0000:00]}"
TWO = f"gpus:\n - {GPU}\n - {{model: t4, bus_id: 0000:06:00.0, pcie: [pci0000:00]}}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("gpus: []\ncolour: red\n", r"unknown field `colour`.*allowed: about, driver_version, .*without"),
        ("gpus:\n - {model: t4, bus: 1}\n", r"\$\.gpus\[0\]|gpus\[\.\.\.\].*allowed: model, bus_id, pcie"),
        ("gpus:\n - {model: t4, bus_id: 5, pcie: [pci0000:00]}\n", r"bus_id|gpus"),
        ("gpus:\n - {model: t4, bus_id: 0000:05:00.0, pcie: []}\n", r"length >= 1"),
        ("gpus:\n - {model: t4, bus_id: 0000:05:00.0, pcie: [a], numa_node: near}\n", r"Expected `int \| null`.*numa_node"),
        ("gpus:\n - {model: k80, bus_id: 0000:05:00.0, pcie: [a]}\n", r"gpus\[0\].model: 'k80' is not among models; allowed: t4"),
        (f"gpus:\n - {GPU}\n - {GPU}\n", r"bus_id 0000:05:00.0 occurs twice"),
        (TWO + "nvlinks: [[0, 2, 1]]\n", r"nvlinks\[0\]: 0 and 2 must be two different GPUs, 0 to 1"),
        (TWO + "nvlinks: [[1, 1, 1]]\n", r"two different GPUs"),
        (TWO + "nvlinks: [[0, 1, 37]]\n", r"gpus\[0\] has 37 NVLinks; at most 36"),
        (TWO + "without: [cuInit]\n", r"\^nvml"),
        (TWO + "fabric: {switches: [], links_per_gpu: 6}\n", r"length >= 1"),
        ("gpus: {\n", r"not YAML.*line"),
    ],
)
def test_a_bad_description_names_file_and_place(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"(?s)node\.yaml: .*({message})"):
        described(tmp_path, body)


@pytest.mark.parametrize(
    ("content", "message"), [(b"- just a list\n", "Expected `object`"), (b"\xff\xfe\x00\x01", r"node\.yaml")]
)
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "node.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load_node(str(tmp_path / "node.yaml"))
