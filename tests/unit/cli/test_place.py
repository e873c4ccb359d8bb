"""`gpumgr place` as scripts use it: what it prints, how it ends, and what it says about bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpumgr.cli.place import command
from gpumgr.common.errors import InputError

DATA = Path(__file__).parents[2] / "data"
SEVEN = str(DATA / "conformance" / "topo_seven_3_4.txt")


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), input=text)


def state_file(folder: Path, *gpus: dict[str, Any]) -> str:
    path = folder / "state.json"
    path.write_text(json.dumps({"gpus": gpus}))
    return str(path)


def test_a_placed_request_is_one_json_object() -> None:
    result = run("--topology", SEVEN, "--cores", "200")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"evaluator": "link", "gpus": [0, 1], "score": 50, "reason": None}


def test_score_is_null_outside_link() -> None:
    assert json.loads(run("--topology", SEVEN, "--cores", "100").stdout)["score"] is None


@pytest.mark.parametrize(
    ("cores", "memory", "evaluator", "words"),
    [
        ("800", "0", "link", "8 entirely free GPUs requested, 7 of 7 are free"),
        ("150", "0", "link", "multiple of 100"),
        ("50", "0", "share", "without memory"),
        ("0", "4", None, "without cores"),
        ("-5", "4", None, "less than 0"),
        ("50", "321", "share", "no GPU has 50 cores and 321 memory blocks free"),
    ],
)
def test_a_refused_request_exits_1_with_a_reason(cores: str, memory: str, evaluator: str | None, words: str) -> None:
    result = run("--topology", SEVEN, "--cores", cores, "--memory", memory)
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["gpus"], answer["score"], answer["evaluator"]) == (1, None, None, evaluator)
    assert words in answer["reason"]


def test_state_and_policy(tmp_path: Path) -> None:
    state = state_file(
        tmp_path,
        {"index": 0, "cores_free": 100, "memory_blocks_free": 320, "healthy": False},
        {"index": 1, "cores_free": 60, "memory_blocks_free": 100},
    )
    arguments = ("--topology", SEVEN, "--state", state, "--cores", "50", "--memory", "20")
    assert json.loads(run(*arguments).stdout)["gpus"] == [1]
    assert json.loads(run(*arguments, "--policy", "spread").stdout)["gpus"] == [2]


def test_a_gpu_is_entirely_free_with_all_its_blocks_only(tmp_path: Path) -> None:
    state = state_file(tmp_path, {"index": 0, "cores_free": 100, "memory_blocks_free": 64})
    arguments = ("--topology", SEVEN, "--state", state, "--cores", "100")
    assert json.loads(run(*arguments).stdout)["gpus"] == [1]
    assert json.loads(run(*arguments, "--memory-blocks-per-gpu", "64").stdout)["gpus"] == [0]


def test_topology_from_stdin_and_text_output() -> None:
    result = run("--topology", "-", "--cores", "300", "--output", "text", text=Path(SEVEN).read_text())
    assert result.stdout == "link: GPU0, GPU1, GPU2 (score 150)\n"
    assert run("--topology", SEVEN, "--cores", "800", "--output", "text").stdout.startswith("refused: 8 entirely free GPUs")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--topology", SEVEN), "Missing option '--cores'"),
        (("--cores", "100"), "one of --topology and --sim is needed"),
        (("--topology", SEVEN, "--sim", "x", "--cores", "1"), "exclude"),
        (("--topology", SEVEN, "--cores", "many"), "many"),
        (("--topology", "/no/such/file", "--cores", "1"), "does not exist"),
        (("--topology", SEVEN, "--cores", "1", "--policy", "random"), "spread"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "Input data was truncated"),
        ('{"gpus": [{"index": 0}]}', "cores_free"),
        ('{"gpus": [{"index": 0, "cores_free": 1, "memory_blocks_free": 1, "color": 1}]}', "unknown field `color`"),
        ('{"gpus": [{"index": 0, "cores_free": 101, "memory_blocks_free": 1}]}', "<= 100"),
        ('{"gpus": [{"index": 0, "cores_free": 50.5, "memory_blocks_free": 1}]}', "Expected `int`, got `float`"),
        ('{"gpus": [{"index": 0, "cores_free": 50, "memory_blocks_free": 321}]}', "more than its 320 blocks"),
        ('{"gpus": [{"index": 0, "cores_free": 50, "memory_blocks_free": -1}]}', ">= 0"),
        ('{"gpus": [{"index": 7, "cores_free": 50, "memory_blocks_free": 1}]}', "GPU 7 is not on this node"),
        (
            '{"gpus": [{"index": 0, "cores_free": 5, "memory_blocks_free": 1},'
            ' {"index": 0, "cores_free": 5, "memory_blocks_free": 1}]}',
            "twice",
        ),
    ],
)
def test_the_error_of_a_malformed_state_names_the_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    result = run("--topology", SEVEN, "--state", str(path), "--cores", "100")
    assert (type(result.exception), result.stdout) == (InputError, "")
    assert words in str(result.exception)


def test_the_error_of_a_malformed_topology_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_bytes(b"\tGPU0\xff")
    result = run("--topology", str(path), "--cores", "100")
    assert type(result.exception) is InputError
    assert "topo.txt" in str(result.exception)
