"""`gpumgr topology` on simulated nodes."""

import json

from click.testing import CliRunner, Result

from gpumgr.cli.topology import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["--sim", "mig-4", *arguments])


def test_text_has_a_line_for_each_mig_device() -> None:
    lines = [line.split() for line in run().stdout.split("\n\n")[2].splitlines()]
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
    gpus = json.loads(run("--output", "json").stdout)["gpus"]
    assert [gpu["mig_enabled"] for gpu in gpus] == [False, False, True, True]
    assert [len(gpu["mig_instances"]) for gpu in gpus] == [0, 0, 4, 2]
    second = gpus[2]["mig_instances"][1]
    assert (second["profile"], second["gpu_instance"], second["memory_bytes"]) == ("2g.10gb", 2, 10 << 30)


def test_text_has_tree_and_matrix_and_json_the_same() -> None:
    tree, matrix = CliRunner().invoke(command, ["--sim", "hgx-h100-8"]).stdout.split("\n\n")[:2]
    assert tree.startswith("ROOT:8:0\n")
    assert matrix.split()[:3] == ["GPU0", "GPU1", "GPU2"]
    data = json.loads(CliRunner().invoke(command, ["--sim", "hgx-h100-8", "--output", "json"]).stdout)
    assert (data["tree"]["name"], data["tree"]["free"], len(data["matrix"])) == ("ROOT", 8, 8)
    assert [(gpu["row"], gpu["label"]) for gpu in data["gpus"][:2]] == [(0, "GPU0"), (1, "GPU1")]
