from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import Node, compile_all


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limiter")
    compile_all(folder)
    return folder


@pytest.fixture
def node(programs: Path, tmp_path: Path) -> Iterator[Node]:
    node = Node(programs, tmp_path)
    yield node
    node.close()
