"""`gpumgr topology` on topo -m text and on a simulated node with MIG devices: tree and matrix, the same as data, and bad input."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from gpumgr.cli.topology import command
from gpumgr.common.errors import InputError
from gpumgr.placement.matrix import parse_topology
from tests.topologies import topology_from_matrix

DATA = Path(__file__).parents[2] / "data"
SEVEN = DATA / "conformance" / "topo_seven_3_4.txt"


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), input=text)


def test_text_shows_tree_matrix_and_nics() -> None:
    result = run("--topology", str(SEVEN))
    assert result.exit_code == 0
    tree, matrix, nics = result.stdout.split("\n\n")
    assert tree + "\n" == (DATA / "conformance" / "tree_seven_3_4.txt").read_text()
    assert parse_topology(matrix).topology == parse_topology(SEVEN.read_text()).topology
    assert nics == "mlx4_0 is nearest to GPU0, GPU1, GPU2\n"


def test_json_shows_the_same() -> None:
    data = json.loads(run("--topology", "-", "--output", "json", text=SEVEN.read_text()).stdout)
    assert topology_from_matrix(data["matrix"]) == parse_topology(SEVEN.read_text()).topology
    assert data["gpus"][3] == {"row": 3, "label": "GPU3", "numa_node": 0}
    assert data["nics"] == [{"name": "mlx4_0", "nearest": [0, 1, 2]}]
    assert (data["tree"]["name"], data["tree"]["free"], data["tree"]["children"][0]["name"]) == ("ROOT", 7, "PHB")


def test_the_error_of_malformed_text_has_the_place(tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text("\tGPU0\tGPU1\nGPU0\t X \tFAR\nGPU1\tFAR\t X \n")
    result = run("--topology", str(path))
    assert (type(result.exception), result.stdout) == (InputError, "")
    assert "topo.txt: line 2, column 2 (GPU1): 'FAR' is not a link" in str(result.exception)


def test_text_has_a_line_for_each_mig_device() -> None:
    lines = [line.split() for line in run("--sim", "mig-4").stdout.split("\n\n")[2].splitlines()]
    assert [(line[0], line[2]) for line in lines] == [
        ("GPU2", "3g.20gb"),
        ("GPU2", "2g.10gb"),
        ("GPU2", "1g.5gb"),
        ("GPU2", "1g.5gb"),
        ("GPU3", "1c.3g.20gb"),
        ("GPU3", "1g.5gb+me"),
    ]
    assert lines[1][4:] == ["(GPU", "instance", "2,", "compute", "instance", "0)"]


def test_json_has_the_mig_devices_under_their_gpu() -> None:
    gpus = json.loads(run("--sim", "mig-4", "--output", "json").stdout)["gpus"]
    assert [(gpu["mig_enabled"], len(gpu["mig_instances"])) for gpu in gpus] == [(False, 0), (False, 0), (True, 4), (True, 2)]
    second = gpus[2]["mig_instances"][1]
    assert (second["profile"], second["gpu_instance"], second["memory_bytes"]) == ("2g.10gb", 2, 10 << 30)
