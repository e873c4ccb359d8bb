"""Commands that use the settings in force find the file of the agent unless an option names another."""

import json
from pathlib import Path

import pytest

from .conftest import Gpumgr
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
        assert (shown.code, shown.out) == (1, "")
        assert shown.err == (
            f"gpumgr: there is no folder {state}: name the agent's settings with --config, or the folder with --dir\n"
        )
    make(state)
    shown = await gpumgr_command("checkpoint", "show")
    assert (shown.code, shown.out.replace("\n", "")) == (0, f"there is no checkpoint at {state}/gpumgr.sqlite3")
    assert json.loads((await gpumgr_command("checkpoint", "show", "--output", "json")).out)["lost"]
