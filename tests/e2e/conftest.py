"""One cluster and one agent for all end-to-end tests; every test begins on a node without pods."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tests.component.enforcement.limiter.harness import compile_all
from tests.once import made_once

from .agent import Agent
from .cluster import Cluster
from .node import Node, cleared
from .places import HERE

#: Files (and one folder) without the cluster, and the unit of work that they belong to. All others are the cluster's unit.
APART: Final = {
    "page": "page",
    "test_benchmarks.py": "wire",
    "test_wire.py": "wire",
    "test_chart.py": "chart",
    "test_chart_claims.py": "chart",
    "test_chart_rights.py": "chart",
    "test_chart_scheduler.py": "chart",
    "test_hardware_program.py": "lab",
    "test_image_build.py": "image",
    "test_lab.py": "lab",
    "test_library_image.py": "image",
    "test_mps_in_a_pod.py": "nspawn",
    "test_prometheus.py": "prometheus",
    "test_promtool.py": "prometheus",
    "test_systemd.py": "nspawn",
}


#: In this order: the cluster's tests take longest, and need the image at their end.
UNITS: Final = ("cluster", "image", "nspawn", "lab", "chart", "page", "prometheus", "wire")
#: Files of the cluster that need the image of the agent. The other process needs minutes to build it.
WITH_IMAGE: Final = {"test_daemonset.py", "test_dra_daemonset.py", "test_scheduler_installed.py"}


def unit_of_work(path: Path) -> str:
    """What runs in one process: there are one cluster and one container of systemd-nspawn."""
    return APART.get(path.relative_to(HERE).parts[0], "cluster")


def place_of(path: Path) -> tuple[int, bool]:
    return UNITS.index(unit_of_work(path)), path.name in WITH_IMAGE


class ClusterApart(LoadScopeScheduling):  # type: ignore[misc]
    """One process has the tests of the cluster, the other takes the other units at the same time.

    pytest-xdist's own groups (`--dist=loadgroup`) have no effect with pytest 9.2, which ignores the names that it gives to tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of_work(self.config.rootpath / nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ClusterApart:
    config.option.loadscopereorder = False
    return ClusterApart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.path) if item.path.is_relative_to(HERE) else (-1, False))
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            # The time of the test alone: the cluster's fixture may have to build binaries first.
            item.add_marker(pytest.mark.timeout(240, func_only=True))
            if "cluster" in getattr(item, "fixturenames", ()):
                assert unit_of_work(item.path) == "cluster", f"{item.nodeid} needs the cluster"


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
def limiter_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver and the CUDA program of the limiter's tests, compiled once for both processes."""
    return made_once(tmp_path_factory, "limiter", compile_all)


@pytest.fixture(scope="session")
def running_agent(cluster: Cluster) -> Iterator[Agent]:
    agent = Agent(cluster)
    try:
        yield agent
    finally:
        agent.close()


@pytest.fixture
def node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    with cleared(cluster, running_agent) as node:
        yield node
