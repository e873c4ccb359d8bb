"""Compiled once for all tests here: the client and the reader."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.files import build_client
from tests.component.compat.gpu_manager.vcuda.harness import Node, compile_c
from tests.unit.compat.gpu_manager.vcuda.tenants import TENANT

DATA = Path(__file__).parents[4] / "data/enforcement"


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(DATA / "vcuda_reader.c", tmp_path_factory.mktemp("reader") / "vcuda_reader")


@pytest.fixture
def node(client: Path) -> Iterator[Node]:
    """pytest's own temporary folders have paths too long for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="gpumgr") as folder:
        yield Node(Path(folder), client)


@pytest.fixture
async def backend(node: Node) -> AsyncIterator[VcudaBackend]:
    """With the tenant's container about to run."""
    made = node.backend()
    await made.start(TENANT)
    try:
        yield made
    finally:
        await made.close()
