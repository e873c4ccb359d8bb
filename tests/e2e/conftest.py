"""One cluster and one agent for all end-to-end tests; every test begins on a node without pods."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from .agent import Agent
from .cluster import Cluster
from .node import Node
from .places import HERE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            # Of the test alone: the cluster's fixture may have to build binaries first.
            item.add_marker(pytest.mark.timeout(240, func_only=True))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.start()
    try:
        yield cluster
    finally:
        kept = Path(os.environ.get("GPUMGR_E2E_LOGS") or tmp_path_factory.mktemp("cluster-logs"))
        cluster.keep_logs(kept)
        cluster.stop()


@pytest.fixture(scope="session")
def running_agent(cluster: Cluster) -> Iterator[Agent]:
    agent = Agent(cluster)
    try:
        yield agent
    finally:
        agent.close()


@pytest.fixture
def node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    running_agent.ensure()
    node = Node(cluster, running_agent)
    node.clear()
    try:
        yield node
    finally:
        node.close()
