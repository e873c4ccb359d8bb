from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole agents with many restarts take more than a test's usual time on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="session", autouse=True)
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The simulated driver is compiled once for all agents, and not into the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
