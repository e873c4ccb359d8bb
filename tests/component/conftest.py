from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster_api import ClusterApiServer


@pytest.fixture(scope="session", autouse=True)
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The simulated driver is compiled once in a process, and not into the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "cache"
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
async def sim() -> AsyncIterator[ClusterApiServer]:
    async with ClusterApiServer("node-1") as running:
        yield running
