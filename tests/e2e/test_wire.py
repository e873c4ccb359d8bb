"""The messages of extender/v1 against the Go types that kube-scheduler uses."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.unit.cluster.scheduler.test_wire import ANSWERS, GOLDENS, given, golden

from .build import build_program


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("extender")


def test_the_goldens_are_what_the_go_types_write(program: Path, tmp_path: Path) -> None:
    subprocess.run([program, "goldens", tmp_path], check=True)
    written = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert written == {each.name: each.read_text() for each in GOLDENS.iterdir()}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_read_by_the_go_types_without_an_unknown_field(program: Path, name: str) -> None:
    kind = {"filter": "filter", "priorities": "prioritize", "binding": "bind"}[name.partition("_")[0]]
    text = msgspec.json.encode(ANSWERS[name])
    read = subprocess.run([program, "check", kind], input=text, stdout=subprocess.PIPE, check=True).stdout
    assert given(json.loads(read)) == given(json.loads(golden(name)))
    if isinstance(ANSWERS[name], list):
        return
    unknown = subprocess.run([program, "check", kind], input=b'{"Unknown": 1}', capture_output=True, check=False)
    assert b'unknown field "Unknown"' in unknown.stderr
