from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.deviceplugin.harness import Served, kubelet_stub, served_plugin, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    async with served_plugin(folder) as plugin:
        yield plugin


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[Any]:
    async with kubelet_stub(served.path) as client:
        yield client
