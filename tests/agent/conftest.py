import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.sim.demo import node
from tests.component.conftest import library_cache

from .forks import ForkedAgent, fork_server

__all__ = ["library_cache"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole agents with many restarts take more than a test's usual time on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="session", autouse=True)
def _forked_agents() -> Iterator[None]:
    """The nodes of these tests fork their agents."""
    with (
        tempfile.TemporaryDirectory(prefix="gmf", dir="/tmp") as folder,
        fork_server(Path(folder)) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(ForkedAgent, "server", server, raising=False)
        patch.setattr(node, "AgentProcess", ForkedAgent)
        yield


@pytest.fixture
def bounded(folder: Path) -> Iterator[Path]:
    """The folder; root gets a tmpfs for the pages of each container there."""
    yield folder
    for pages_of_one in (folder / "run/limiter").glob("*"):
        BoundedFolders().remove(pages_of_one)
