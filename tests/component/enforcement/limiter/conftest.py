import platform
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import Node, Target, compile_all
from tests.once import made_once
from tools.limiter import ARCHITECTURES, compiler


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "limiter", compile_all)


@pytest.fixture(scope="session", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The library and the fake driver for each architecture; programs of another one than this machine's run under qemu."""
    if request.param == platform.machine():
        return Target(programs)
    command, qemu = compiler(request.param), f"qemu-{request.param}"
    if command is None or shutil.which(qemu) is None:
        pytest.skip(f"{request.param}-linux-gnu-gcc or {qemu} is not installed")
    folder = made_once(tmp_path_factory, request.param, partial(compile_all, command=command))
    return Target(folder, command, (qemu, "-L", f"/usr/{request.param}-linux-gnu"))


@pytest.fixture
def node(programs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """With one GPU, or as the test's parameter says."""
    node = Node(programs, tmp_path, **getattr(request, "param", {}))
    yield node
    node.close()
