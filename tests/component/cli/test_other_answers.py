"""Commands that ask the API server, when its answers have another structure."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from .conftest import Gpumgr
from .peer import api_server

SIMULATE = ("simulate", "--from-cluster", "--snapshot", "/dev/null")
MIGRATE = ("migrate", "hami", "--node", "n")
WHY = ("why", "team/web")
MISSING = "Object missing required field `items`"


@pytest.fixture
def answer() -> Any:
    """The answer to each request."""
    return {}


@pytest.fixture
async def kubeconfig(answer: Any, tmp_path: Path) -> AsyncIterator[Path]:
    async def respond(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    async with api_server(tmp_path / "kubeconfig", respond) as kubeconfig:
        yield kubeconfig


@pytest.mark.parametrize(
    ("command", "answer", "wrong"),
    [
        (SIMULATE, {"items": 5}, "Expected `array | null`, got `int` - at `$.items`"),
        (SIMULATE, {"items": [], "metadata": 5}, "AttributeError: 'int' object has no attribute 'get'"),
        (MIGRATE, {}, MISSING),
        (MIGRATE, {"items": [None]}, "Expected `object`, got `null` - at `$[0]`"),
        (WHY, {}, MISSING),
        (("suspend", "team/web"), {}, "KeyError: 'metadata'"),
    ],
)
async def test_an_answer_of_another_structure_is_an_error(
    command: tuple[str, ...], wrong: str, kubeconfig: Path, gpumgr_command: Gpumgr
) -> None:
    ended = await gpumgr_command(*command, "--kubeconfig", kubeconfig)
    ended.failed(1)
    assert ended.err == f"gpumgr: the answer of the API server of {kubeconfig} has another structure: {wrong}\n"


@pytest.mark.parametrize("answer", [[]])
async def test_an_answer_that_is_no_object_is_an_error(kubeconfig: Path, gpumgr_command: Gpumgr) -> None:
    (await gpumgr_command(*WHY, "--kubeconfig", kubeconfig)).failed(
        1, "(the API server's answer is no JSON object: Expected `object`, got `array`); name the scheduler's pod"
    )


@pytest.mark.parametrize("answer", [{"items": None}])
async def test_a_list_that_is_null_is_empty(kubeconfig: Path, tmp_path: Path, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command(*MIGRATE, "--kubeconfig", kubeconfig)
    assert (ended.code, ended.err) == (0, "")
    assert "no pod of this node has a GPU from HAMi" in ended.out
    snapshot = tmp_path / "snapshot.json"
    ended = await gpumgr_command("simulate", "--from-cluster", "--snapshot", snapshot, "--kubeconfig", kubeconfig)
    assert (ended.code, ended.err) == (0, "")
    assert '"nodes": []' in snapshot.read_text()
