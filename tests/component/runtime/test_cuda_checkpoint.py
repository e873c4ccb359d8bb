"""The helper process against a stand-in for the driver's checkpoint functions, with two real processes of a container."""

import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumgr.common.proc import PROC, start_time_ticks
from gpumgr.ledger.suspension import Moved, Suspension, Verb
from gpumgr.runtime import suspend_parts

SOURCE = Path(__file__).parents[2] / "data/suspend/cuda.c"
RUNNING, LOCKED, CHECKPOINTED, FAILED = "0", "1", "2", "3"


@dataclass
class Container:
    """Two processes that use CUDA, and one that does not."""

    folder: Path
    library: Path
    processes: list[subprocess.Popen[bytes]]

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.processes]

    async def move(self, verb: Verb, *, more: int = 0) -> Moved:
        """`more`: further processes, which have ended."""
        running = [(pid, start_time_ticks(pid) or 0) for pid in self.pids]
        running += [(pid, 1) for pid in range(1 << 30, (1 << 30) + more)]
        required = tuple(self.pids[:2])
        known = Suspension(state="running", processes=tuple(running), required=required, memory_bytes={"gpu": 1 << 30})
        lock = self.folder / "lock"
        return await suspend_parts.move(verb, "a", known, library=str(self.library), proc_root=PROC, lock_file=lock)

    def put(self, *states: str) -> None:
        for pid, state in zip(self.pids, states, strict=False):
            (self.folder / str(pid)).write_text(state)

    def states(self) -> list[str]:
        return [(self.folder / str(pid)).read_text().strip() for pid in self.pids[:2]]

    def fails(self, function: str, process: int, code: int = 999) -> None:
        (self.folder / f"fail-{function}").write_text(f"{self.pids[process]} {code}\n")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    monkeypatch.setenv("FAKE_CUDA", str(tmp_path))
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    made = Container(tmp_path, library, processes)
    made.put(RUNNING, RUNNING)
    yield made
    for process in processes:
        process.kill()
        process.wait()


async def test_all_processes_of_a_container_are_suspended_and_resumed(container: Container) -> None:
    two = container.pids[:2]
    assert await container.move("suspend") == Moved(pids=two, held=two, failed=[])
    assert container.states() == [CHECKPOINTED, CHECKPOINTED]
    assert await container.move("suspend") == Moved(pids=two, held=two, failed=[]), "it was done before"
    assert await container.move("resume") == Moved(pids=two, held=[], failed=[])
    assert container.states() == [RUNNING, RUNNING]


@pytest.mark.parametrize("function", ["Lock", "Checkpoint"])
@pytest.mark.parametrize("process", [0, 1])
async def test_if_one_process_can_not_be_suspended_the_others_run_on(container: Container, function: str, process: int) -> None:
    container.fails(function, process)
    moved = await container.move("suspend")
    assert moved.error == f"cuCheckpointProcess{function} of process {container.pids[process]}: CUDA error 999"
    assert (moved.held, moved.failed, container.states()) == ([], [], [RUNNING, RUNNING])


@pytest.mark.parametrize("process", [0, 1])
async def test_without_memory_for_one_process_the_container_stays_suspended(container: Container, process: int) -> None:
    container.put(CHECKPOINTED, CHECKPOINTED)
    container.fails("Restore", process, 2)
    moved = await container.move("resume")
    assert (moved.out_of_memory, moved.held) == (True, container.pids[:2])
    assert container.states() == [CHECKPOINTED, CHECKPOINTED]


async def test_the_others_run_on_if_one_process_can_not_be_restored(container: Container) -> None:
    container.put(CHECKPOINTED, CHECKPOINTED)
    container.fails("Restore", 0)
    moved = await container.move("resume")
    assert (moved.out_of_memory, moved.held) == (False, [container.pids[0]])
    assert container.states() == [CHECKPOINTED, RUNNING]


async def test_a_failed_process_is_reported_and_the_others_run(container: Container) -> None:
    container.put(FAILED, CHECKPOINTED)
    moved = await container.move("resume")
    assert (moved.failed, container.states()) == ([container.pids[0]], [FAILED, RUNNING])


async def test_a_process_that_has_ended_is_left_out(container: Container) -> None:
    container.processes[0].kill()
    container.processes[0].wait()
    assert await container.move("suspend") == Moved(pids=[container.pids[1]], held=[container.pids[1]], failed=[])


@pytest.mark.parametrize(("missing", "said"), [("library", "libcuda.so.1"), ("program", "can't be started")])
@pytest.mark.parametrize("verb", ["suspend", "resume"])
async def test_without_the_drivers_library_or_the_program_no_state_is_known(
    container: Container, monkeypatch: pytest.MonkeyPatch, verb: Verb, missing: str, said: str
) -> None:
    container.put(LOCKED, CHECKPOINTED)  # an earlier run was killed
    if missing == "library":
        container.library.unlink()
    else:
        monkeypatch.setattr("sys.executable", str(container.folder / "missing"))
    moved = await container.move(verb)
    assert said in (moved.error or "")
    assert not moved.pids
    assert (moved.held, moved.untouched, container.states()) == (container.pids, True, [LOCKED, CHECKPOINTED])


async def test_the_kernels_limit_of_arguments_is_none_of_processes(container: Container) -> None:
    """The arguments of a program may have a quarter of the stack's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, hard))
    try:
        moved = await container.move("suspend", more=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    assert moved.error is None
    assert container.states() == [CHECKPOINTED, CHECKPOINTED]


async def test_a_process_on_the_gpu_without_a_state_prevents_the_suspension(container: Container) -> None:
    (container.folder / str(container.pids[1])).unlink()
    moved = await container.move("suspend")
    assert moved.error == f"process {container.pids[1]} can't be suspended"
    assert (moved.untouched, (container.folder / str(container.pids[0])).read_text()) == (True, RUNNING)
    assert not (container.folder / "calls").exists()


async def test_a_resume_without_the_state_of_a_process_is_no_success(container: Container) -> None:
    container.put(CHECKPOINTED, CHECKPOINTED)
    (container.folder / str(container.pids[1])).unlink()
    moved = await container.move("resume")
    assert moved.error == f"the driver does not report the state of process {container.pids[1]}"
    assert moved.held == [container.pids[1]]


async def test_an_operation_that_takes_too_long_is_ended(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.runtime.suspend_parts._LIMIT_SECONDS", 0.2)
    monkeypatch.setattr("gpumgr.runtime.suspend_parts._LIMIT_SECONDS_PER_GIB", 0.0)
    (container.folder / "wait-Lock").touch()
    moved = await container.move("suspend")
    assert moved.error == "the driver did not suspend it within 0.2 s"
    assert moved.held == container.pids
