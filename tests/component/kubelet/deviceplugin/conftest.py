from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.kubelet import SimKubelet
from tests.component.kubelet.deviceplugin.harness import Served, kubelet_stub, served_plugin


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    async with served_plugin(folder) as plugin:
        yield plugin


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[Any]:
    async with kubelet_stub(served.path) as client:
        yield client


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[SimKubelet]:
    async with SimKubelet(folder) as running:
        yield running
