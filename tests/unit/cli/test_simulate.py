"""`gpumgr simulate` on a small trace: the contract of its outputs."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpumgr.cli import group
from gpumgr.errors import InputError


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
    return CliRunner().invoke(group, ["simulate", "--nodes", files[0], "--pods", files[1], *options])


def test_json_is_the_contract_and_the_same_in_processes(files: tuple[str, str], tmp_path: Path) -> None:
    options = ("--method", "inflate", "--policy", "best-fit,random", "--policy", "binpack", "--seed", "42", "--seed", "43")
    times = tmp_path / "times.csv"
    found = simulate(files, *options, "--output", "json", "--times", str(times))
    assert found.exit_code == 0, found.output
    assert simulate(files, *options, "--output", "json", "--processes", "1").stdout == found.stdout
    assert "1 row skipped, nodes without GPUs: cpu-only" in found.stderr
    results = json.loads(found.stdout)["results"]
    assert [(each["policy"], each["seed"]) for each in results] == [
        (policy, seed) for policy in ("best-fit", "random", "binpack") for seed in (42, 43)
    ]
    for each in results:
        assert set(each) == {"policy", "seed", "allocated_percent", "fragmentation_percent", "failed_pods"}
        assert set(each["allocated_percent"]) == {"100", "130"}
        assert set(each["fragmentation_percent"]) == {"50", "80", "90"}
        assert set(each["failed_pods"]) == {"none", "share", "1", "2", "4", "8"}
        assert 50 < each["allocated_percent"]["100"] <= each["allocated_percent"]["130"] <= 100
    measured = list(csv.DictReader(io.StringIO(times.read_text())))
    assert [row["policy"] for row in measured] == [each["policy"] for each in results]
    assert all(0 < float(row["p50_microseconds"]) <= float(row["p99_microseconds"]) for row in measured)


def test_table_and_csv(files: tuple[str, str]) -> None:
    options = ("--policy", "best-fit", "--seed", "1", "--seed", "2")
    header, row = simulate(files, *options).stdout.splitlines()
    assert header.split()[:4] == ["POLICY", "SEEDS", "ALLOC@100%", "ALLOC@130%"]
    assert header.endswith("IDLE GPUS")
    assert row.split()[:2] == ["best-fit", "2"]
    assert row.count("±") == 12
    rows = list(csv.DictReader(io.StringIO(simulate(files, *options, "--output", "csv").stdout)))
    assert [each["seed"] for each in rows] == ["1", "2"]
    assert float(row.split()[4]) == pytest.approx(sum(float(each["allocated_percent_130"]) for each in rows) / 2, abs=0.006)


def test_wrong_usage_and_input(files: tuple[str, str], tmp_path: Path) -> None:
    assert "'best' is no policy; there are least-fragmentation, binpack" in simulate(files, "--policy", "best").stderr
    nodes, _ = files
    no_gpus, binary = tmp_path / "none.csv", tmp_path / "binary.csv"
    no_gpus.write_text("name,gpus,cpu_milli,ram_mebibytes\nx,0,1,1\n")
    binary.write_bytes(b"name\xff\n")
    for pods, message in ((no_gpus, "no pod of the trace requests a GPU"), (binary, "it is not UTF-8 text")):
        error = simulate((nodes, str(pods))).exception
        assert isinstance(error, InputError)
        assert message in str(error)


def test_the_help_lists_all_policies() -> None:
    text = " ".join(CliRunner().invoke(group, ["simulate", "--help"]).stdout.split())
    for policy in (
        "binpack",
        "least-fragmentation",
        "random",
        "dot-product",
        "packing",
        "clustering",
        "fgd",
        "dra-most-allocated",
    ):
        assert policy in text


def test_a_process_of_a_simulation_does_not_load_the_client_of_the_api_server() -> None:
    code = "import sys, gpumgr.cli.simulate; sys.exit('aiohttp' in sys.modules or 'gpumgr.scheduler' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
