"""`gpumgr config`; and commands that use the settings in force find the file of the agent unless an option names another."""

import json
from pathlib import Path

import pytest
import yaml

from .conftest import Ended, Gpumgr
from .remembered import remember


@pytest.fixture
def state(folder: Path, monkeypatch: pytest.MonkeyPatch, _no_settings_of_this_host: None) -> Path:
    """The folder that the file in the default's place names for the checkpoint."""
    monkeypatch.delenv("GPUMGR_CHECKPOINT_DIR")
    (folder / "gpumgr.yaml").write_text(f"checkpoint: {{dir: {folder}/state}}\nhttp: {{port: 9000}}\n")
    return folder / "state"


def make(folder: Path) -> None:
    folder.mkdir()


async def test_the_checkpoint_of_the_default_file_is_shown_with_one_line_for_each_allocation(
    state: Path, gpumgr_command: Gpumgr
) -> None:
    await remember(state)
    shown = await gpumgr_command("checkpoint", "show", "--output", "json")
    assert shown.code == 0
    assert [each["pod"] for each in json.loads(shown.out)["allocations"]] == ["resnet-0"]
    title, heading, row = (await gpumgr_command("checkpoint", "show")).out.splitlines()
    assert " ".join(title.split()) == "1 allocation on 2 GPUs"
    assert " ".join(heading.split()) == "Allocation Pod Container GPUs Cores MiB Since (UTC) Why"
    assert " ".join(row.split()) == "a1 team/resnet-0 main 11111111 30 512 11-14 22:13:20 the least free room"


async def test_settings_in_force_are_those_of_the_default_file(state: Path, gpumgr_command: Gpumgr) -> None:
    document = json.loads((await gpumgr_command("config", "show", "--output", "json")).out)
    assert (document["checkpoint"]["dir"], document["http"]["port"]) == (str(state), 9000)


async def test_a_place_without_checkpoint_is_not_taken_for_one_without_allocations(state: Path, gpumgr_command: Gpumgr) -> None:
    for output in ("text", "json"):
        shown = await gpumgr_command("checkpoint", "show", "--output", output)
        message = f"there is no folder {state}: name the agent's settings with --config, or the folder with --dir"
        assert shown == Ended(code=1, out="", err=f"gpumgr: {message}\n")
    make(state)
    shown = await gpumgr_command("checkpoint", "show")
    assert (shown.code, shown.out.replace("\n", "")) == (0, f"there is no checkpoint at {state}/gpumgr.sqlite3")
    assert json.loads((await gpumgr_command("checkpoint", "show", "--output", "json")).out)["lost"]


# -- config ------------------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    (folder / "file.yaml").write_text(text)
    return folder / "file.yaml"


async def test_a_right_file_is_ok(folder: Path, gpumgr_command: Gpumgr) -> None:
    file = write(folder, "http: {port: 80}\n")
    assert await gpumgr_command("config", "check", file) == Ended(code=0, out="ok\n", err="")
    found = await gpumgr_command("config", "check", file, "--output", "json")
    assert (found.code, json.loads(found.out)) == (0, {"ok": True, "problems": []})


async def test_a_wrong_file_names_every_mistake(folder: Path, gpumgr_command: Gpumgr) -> None:
    file = write(folder, "http:\n  port: 1e9\nlog: {level: loud}\n")
    found = await gpumgr_command("config", "check", file)
    found.failed(2)
    assert [line.partition(": ")[0] for line in found.err.splitlines()] == [f"{file}:2", f"{file}:3"]
    found = await gpumgr_command("config", "check", file, "--output", "json")
    port = "'1e9' is not allowed; allowed: a whole number from 0 to 65535"
    level = "'loud' is not allowed; allowed: one of debug, error, info, warning"
    problems = [
        {"file": str(file), "line": 2, "key": "http.port", "message": port},
        {"file": str(file), "line": 3, "key": "log.level", "message": level},
    ]
    assert (found.code, json.loads(found.out)) == (2, {"ok": False, "problems": problems})


async def test_the_settings_of_file_and_environment_are_shown_as_a_file(
    folder: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMGR_LOG_LEVEL", "debug")
    shown = (await gpumgr_command("config", "show", "--config", write(folder, "http: {port: 80}\n"))).out
    document = yaml.safe_load(shown)
    assert (document["http"]["port"], document["log"]["level"]) == (80, "debug")
    assert (await gpumgr_command("config", "check", write(folder, shown))).code == 0
    again = await gpumgr_command("config", "show", "--config", folder / "file.yaml", "--output", "json")
    assert json.loads(again.out) == document
    monkeypatch.setenv("GPUMGR_HTTP_PORT", "x")
    (await gpumgr_command("config", "show")).failed(2, "environment variable GPUMGR_HTTP_PORT: http.port: 'x' is not allowed")
