from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster_api import ClusterApiServer

#: Fixtures of these folders that are made once for all tests (tests/once.py): compilers, hatchling and pip run for a minute on a busy
#: machine.
_MADE_ONCE = {"programs", "target", "wheel", "archive", "installed"}
_FOLDERS = [Path(__file__).parent / name for name in ("enforcement/limiter", "package")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs such a fixture, and each process that waits for it, has the time to make it. `items` are those of all
    folders, where other fixtures may have the same names."""
    for item in items:
        in_folder = any(folder in item.path.parents for folder in _FOLDERS)
        if in_folder and isinstance(item, pytest.Function) and not _MADE_ONCE.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.timeout(300))


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
