import fcntl
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import Node, Target, compile_all
from tools.limiter import ARCHITECTURES, compiler


def _compiled(factory: pytest.TempPathFactory, name: str, worker: str, command: Sequence[str] | None = None) -> Path:
    """The folder of what compile_all makes, once for all processes of a run."""
    folder = (factory.getbasetemp() if worker == "master" else factory.getbasetemp().parent) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            compile_all(folder, command)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return _compiled(tmp_path_factory, "limiter", worker_id)


@pytest.fixture(scope="session", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, programs: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Target:
    """The library and the fake driver for each architecture; programs of another one than this machine's run under qemu."""
    if request.param == platform.machine():
        return Target(programs)
    command, qemu = compiler(request.param), f"qemu-{request.param}"
    if command is None or shutil.which(qemu) is None:
        pytest.skip(f"{request.param}-linux-gnu-gcc or {qemu} is not installed")
    folder = _compiled(tmp_path_factory, request.param, worker_id, command)
    return Target(folder, command, (qemu, "-L", f"/usr/{request.param}-linux-gnu"))


@pytest.fixture
def node(programs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """With one GPU, or as many as the test's parameter says."""
    node = Node(programs, tmp_path, gpus=getattr(request, "param", 1))
    yield node
    node.close()
