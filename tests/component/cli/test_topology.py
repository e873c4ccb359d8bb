"""`gpumgr topology` on a simulated node with MIG devices."""

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
