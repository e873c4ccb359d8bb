from collections.abc import AsyncIterator

import pytest

from gpumgr.sim.apiserver import SimApiServer


@pytest.fixture
async def sim() -> AsyncIterator[SimApiServer]:
    async with SimApiServer("node-1") as running:
        yield running
