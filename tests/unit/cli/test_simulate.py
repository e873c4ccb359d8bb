"""`gpumgr simulate` on a small trace: the contract of its outputs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpumgr.cli import group
from gpumgr.common.errors import InputError


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Four nodes with 16 GPUs, one node without; pods of five kinds that ask for 9.6 GPUs."""
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text(
        "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{n},48000,99999,4,T4\n" for n in range(4)) + "cpu-only,1,1,0,\n"
    )
    rows = ["2000,1,1,300"] * 12 + ["6000,1,1,1000"] * 2 + ["9000,1,2,1000", "20000,1,0,0"]
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "".join(f"p{n},{row}\n" for n, row in enumerate(rows)))
    return str(nodes), str(pods)


def simulate(files: tuple[str, str], *options: str) -> Result:
    """In this process, unless the options have another number."""
    return CliRunner().invoke(group, ["simulate", "--nodes", files[0], "--pods", files[1], "--processes", "1", *options])


def test_json_is_the_contract_and_the_same_in_processes(files: tuple[str, str]) -> None:
    options = ("--method", "inflate", "--policy", "best-fit,random", "--policy", "binpack", "--seed", "42", "--seed", "43")
    found = simulate(files, *options, "--output", "json", "--processes", "2")
    assert found.exit_code == 0, found.output
    assert simulate(files, *options, "--output", "json").stdout == found.stdout
    assert "1 row skipped, nodes without GPUs: cpu-only" in found.stderr
    results = json.loads(found.stdout)["results"]
    assert [(each["policy"], each["seed"]) for each in results] == [
        (policy, seed) for policy in ("best-fit", "random", "binpack") for seed in (42, 43)
    ]
    for each in results:
        assert set(each) == {"policy", "seed", "allocated_percent", "fragmentation_percent", "failed_pods", "idle_gpus"}
        assert set(each["allocated_percent"]) == {"100", "130"}
        assert set(each["fragmentation_percent"]) == {"50", "80", "90"}
        assert set(each["failed_pods"]) == {"none", "share", "1", "2", "4", "8"}
        assert 50 < each["allocated_percent"]["100"] <= each["allocated_percent"]["130"] <= 100


def test_table(files: tuple[str, str]) -> None:
    options = ("--policy", "best-fit", "--seed", "1", "--seed", "2")
    header, row = simulate(files, *options).stdout.splitlines()
    assert header.split()[:4] == ["POLICY", "SEEDS", "ALLOC@100%", "ALLOC@130%"]
    assert header.endswith("IDLE GPUS")
    assert row.split()[:2] == ["best-fit", "2"]
    assert row.count("±") == 12
    results = json.loads(simulate(files, *options, "--output", "json").stdout)["results"]
    assert float(row.split()[4]) == pytest.approx(sum(each["allocated_percent"]["130"] for each in results) / 2, abs=0.006)


def test_wrong_usage_and_input(files: tuple[str, str], tmp_path: Path) -> None:
    assert "'best' is not a policy; there are least-fragmentation, binpack" in simulate(files, "--policy", "best").stderr
    nodes, _ = files
    no_gpus, binary = tmp_path / "none.csv", tmp_path / "binary.csv"
    no_gpus.write_text("name,gpus,cpu_milli,ram_mebibytes\nx,0,1,1\n")
    binary.write_bytes(b"name,gpus,cpu_milli,ram_mebibytes\nx\xff,0,1,1\n")
    assert "'nan' is not a number" in simulate(files, "--cpus-per-gpu", "nan").stderr
    error = simulate(files, "--method", "replay").exception
    assert isinstance(error, InputError)
    assert "no pod has an arrival or a duration" in str(error)
    for pods, message in (
        (no_gpus, "no pod of the trace requests a GPU"),
        (binary, "binary.csv, line 2: it is not UTF-8 text: invalid"),
    ):
        error = simulate((nodes, str(pods))).exception
        assert isinstance(error, InputError)
        assert message in str(error)


def test_replay_in_all_outputs(files: tuple[str, str], tmp_path: Path) -> None:
    """Sixteen pods that each hold 4 GPUs for 100 s arrive at once on 16 GPUs, and one that never fits."""
    pods = tmp_path / "replayed.csv"
    pods.write_text(
        "name,gpus,cpu_milli,ram_mebibytes,arrival_seconds,duration_seconds\n"
        + "".join(f"<b>p{n},4,1,1,50,100\n" for n in range(16))
        + "large,8,1,1,50,100\n"
    )
    options = ("--method", "replay", "--policy", "binpack,random", "--seed", "3")
    found = simulate((files[0], str(pods)), *options, "--output", "json")
    assert found.stdout == simulate((files[0], str(pods)), *options, "--output", "json").stdout
    for result in json.loads(found.stdout)["results"]:
        assert result.pop("failed_pods") == {"none": 0, "share": 0, "1": 0, "2": 0, "4": 0, "8": 1}
        assert result == {
            "policy": result["policy"],
            "seed": 3,
            "allocated_percent": {"mean": 100, "max": 100},
            "queue_length": {"mean": 9, "max": 13},
            "waiting_seconds": {"mean": 150, "p50": 150, "p99": 300},
        }
    header, *rows = simulate((files[0], str(pods)), *options).stdout.splitlines()
    assert "WAIT mean s" in header
    assert [(row.split()[0], row.split()[8]) for row in rows] == [("binpack", "300.0"), ("random", "300.0")]
