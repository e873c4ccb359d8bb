"""For all tests of the choice of nodes: the number of choices that are computed."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from gpumgr.cluster.core import node_search
from gpumgr.cluster.core.choose import choose
from gpumgr.cluster.core.node import NodeState


@pytest.fixture
def computed() -> Iterator[list[int]]:
    """The number of GPUs of each kind of node for which a choice was computed and kept."""
    sizes: list[int] = []

    def counted(node: NodeState, *rest: object) -> object:
        sizes.append(len(node.gpus))
        return choose(node, *rest)  # type: ignore[arg-type]

    with patch.object(node_search, "choose", counted):
        yield sizes
