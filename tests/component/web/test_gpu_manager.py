"""gpu-manager's three pages as its clients get them over HTTP: whole answers against golden files."""

import json
import platform
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import gpumgr
from gpumgr.compat.gpu_manager.display import usage_message
from tests.component.web.scene import Scene
from tests.unit.compat.gpu_manager.display.test_messages import SHARE_VIEW, SHARED, TRAIN_VIEW, WHOLE, busy, pods

GOLDEN = Path(__file__).parents[2] / "data" / "display"


@pytest.fixture
def scene() -> Scene:
    """A node with three GPUs, a share on the first and a pod that has the two others whole."""
    return Busy()


class Busy(Scene):
    def __init__(self) -> None:
        super().__init__()
        self.agent_state = busy(SHARED, WHOLE).view

    def usage(self) -> dict[str, Any]:
        return usage_message(busy(SHARED, WHOLE), pods(SHARE_VIEW, TRAIN_VIEW))


@pytest.mark.parametrize(("path", "name"), [("/graph", "http_graph"), ("/usage", "usage"), ("/version", "http_version")])
async def test_the_whole_answer(client: aiohttp.ClientSession, path: str, name: str) -> None:
    text = (GOLDEN / f"{name}.json").read_text()
    expected = json.loads(text.replace("GPUMGR", gpumgr.__version__).replace("PYTHON", platform.python_version()))
    async with client.get(path) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
        told = await answer.json()
    # As text, since 37.0 would be equal to 37 and is not for every client.
    assert json.dumps(told, indent=1, sort_keys=True) == json.dumps(expected, indent=1, sort_keys=True)


async def test_without_any_use(client: aiohttp.ClientSession, scene: Scene) -> None:
    scene.usage = dict  # type: ignore[method-assign]
    async with client.get("/usage") as answer:
        assert await answer.text() == (GOLDEN / "nothing.json").read_text().strip()
