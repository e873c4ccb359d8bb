from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumgr.enforcement.container_files import BoundedFolders
from tests.component.conftest import library_cache

__all__ = ["library_cache"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole agents with many restarts take more than a test's usual time on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture
def bounded(folder: Path) -> Iterator[Path]:
    """The folder; root gets a tmpfs for the pages of each container there."""
    yield folder
    for pages_of_one in (folder / "run/limiter").glob("*"):
        BoundedFolders().remove(pages_of_one)
