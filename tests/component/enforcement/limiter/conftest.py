import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import Node, Target, compile_all
from tools.limiter import ARCHITECTURES, compiler


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limiter")
    compile_all(folder)
    return folder


@pytest.fixture(scope="session", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The library and the fake driver for each architecture; programs of another one than this machine's run under qemu."""
    if request.param == platform.machine():
        return Target(programs)
    command, qemu = compiler(request.param), f"qemu-{request.param}"
    if command is None or shutil.which(qemu) is None:
        pytest.skip(f"{request.param}-linux-gnu-gcc or {qemu} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    compile_all(folder, command=command)
    return Target(folder, command, (qemu, "-L", f"/usr/{request.param}-linux-gnu"))


@pytest.fixture
def node(programs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """With one GPU, or as many as the test's parameter says."""
    node = Node(programs, tmp_path, gpus=getattr(request, "param", 1))
    yield node
    node.close()
