"""The program that measures limits on a GPU (tests/hardware), with the lab's fake GPU and the real programs."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.nodes import load_node
from tests.component.enforcement.limiter.harness import Node
from tests.hardware import suspend
from tests.hardware.bare import ROOT
from tests.hardware.measure import TORCH_ALLOCATORS, TORCH_LOADS
from tests.lab.files import CONTROL_PROGRAM, LabFiles, obstacle
from tests.lab.gpu import FakeGpu
from tests.lab.hami_core import WRONG
from tests.lab.limiter import node_with_fake_gpu
from tests.lab.mps import SERVER

_OBSTACLE = obstacle()


_STAND_INS = Path(__file__).parents[1] / "data" / "hardware"

pytestmark = pytest.mark.skipif(_OBSTACLE is not None, reason=f"the lab can't run: {_OBSTACLE}")


@pytest.fixture(scope="module")
def files() -> LabFiles:
    return LabFiles.find()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, files: LabFiles) -> Path:
    """The fake GPU, compiled, with its state in `state`, and the node that has it in node.yaml."""
    folder = tmp_path_factory.mktemp("fake")
    subprocess.run([files.fake / "build.sh", folder], check=True, capture_output=True)
    FakeGpu(folder / "state", load_node(node_with_fake_gpu(folder / "node.yaml")), 0)
    return folder


def measured(
    fake: Path,
    driver: str,
    out: Path,
    *words: str | Path,
    command: Sequence[str | Path] = (sys.executable, "-m", "tests.hardware"),
) -> tuple[int, Mapping[str, Any]]:
    """Exit status, and the result of the one mechanism. `driver`: the folder of the fake libcuda."""
    environ = (f"LD_LIBRARY_PATH={fake / driver}", f"FAKEGPU_STATE={fake}/state")
    options: list[str | Path] = ["--sim", str(fake / "node.yaml"), "--seconds", "1", "--out", out]
    options += [word for each in environ for word in ("--environ", each)]
    path = os.pathsep.join((str(_STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run([*command, *words, *options], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert (out / "results.json").is_file(), done.stderr
    assert "# Limits measured on a GPU" in (out / "results.md").read_text()
    (result,) = json.loads((out / "results.json").read_text())["mechanisms"]
    return done.returncode, result


@pytest.mark.parametrize(("mechanism", "refusal"), [("none", 0), ("limiter", 2), ("mps", 0), ("hami-core", 2)])
def test_each_mechanism_is_measured_to_the_end(mechanism: str, refusal: int, fake: Path, files: LabFiles, tmp_path: Path) -> None:
    words: list[str | Path] = [mechanism]
    if mechanism in ("mps", "hami-core"):
        usable = [path for name, path in sorted(files.binaries[mechanism].items()) if name not in WRONG]
        if not usable:
            pytest.skip(f"the lab has no program of {mechanism}")
        program = shutil.copy(usable[-1], tmp_path / (CONTROL_PROGRAM if mechanism == "mps" else "libvgpu.so"))
        shutil.copy(fake / "mps-server", tmp_path / SERVER)  # the real server needs a GPU
        words += ["--mps-control" if mechanism == "mps" else "--hami-core", program]
    status, result = measured(fake, "outx" if mechanism == "mps" else "out", tmp_path / "out", *words)
    assert (status, result["mechanism"], result["obstacle"], result["uses"]) == (0, mechanism, None, mechanism)
    assert [share["cores"] for share in (*result["alone"], *result["together"])] == [25, 50, 75, 25, 75]
    assert all(share["refusal"] == refusal and share["rate_percent"] > 0 for share in result["alone"])
    torch = [(load["tenants"], load["cores"], load["load"]) for load in result["torch_loads"] if load["rate_percent"] > 0]
    alone = [(1, 25, load) for load in TORCH_LOADS]
    assert torch == ([] if mechanism == "none" else [(2, 25, "products"), (2, 75, "products"), *alone])
    allocators = {each["allocator"]: each["refusal"] for each in result["torch_memory"]}
    assert allocators == (
        {} if mechanism == "none" else dict.fromkeys(TORCH_ALLOCATORS, "CUDA out of memory." if refusal else None)
    )


def test_a_machine_with_nothing_but_python_and_a_folder_of_wheels_measures(fake: Path, tmp_path: Path) -> None:
    environment, wheels = tmp_path / "python", tmp_path / "wheels"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run([*pip, "-r", ROOT / "config/image/requirements.lock", "-d", wheels], check=True)
    command = (environment / "bin" / "python", ROOT / "tests" / "hardware" / "bare.py", wheels)
    status, result = measured(fake, "out", tmp_path / "out", "none", command=command)
    assert (status, result["obstacle"], len(result["alone"])) == (0, None, 3)


def test_a_mechanism_that_can_not_be_used_is_a_failure_with_its_reason(fake: Path, tmp_path: Path) -> None:
    status, result = measured(fake, "out", tmp_path / "out", "hami-core")
    assert (status, result["obstacle"]) == (1, "no library was given: --hami-core FILE")


@pytest.mark.parametrize(("failures", "status", "said"), [("", 0, ""), ("restore 0 999\n", 1, "agent, restore")])
def test_a_suspension_is_measured_until_a_step_fails(
    failures: str, status: int, said: str, tmp_path: Path, limiter_programs: Path
) -> None:
    node = Node(limiter_programs, tmp_path)
    node.fail_steps(failures)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(limiter_programs), "FAKE_GPU": str(tmp_path / "gpu")}
    command = [sys.executable, "-m", "tests.hardware.suspend", "2:2", "3:1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    rows = [line.partition(":")[0] for line in done.stdout.splitlines() if "GiB" in line]
    assert rows == ([] if failures else ["2 GiB, 2 of 2 rounds", "3 GiB, 1 of 1 rounds"])


def test_a_failed_step_ends_the_tenants_whose_answers_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, answers = threading.Event(), list[bool]()

    class Stuck:
        """Its tenant answers only by its end."""

        def __init__(self, folder: Path) -> None: ...

        def start(self) -> float:
            return 1.0

        def hold(self, gib: int, byte: int) -> None: ...

        def move(self, _byte: int, _rate: float, pool: ThreadPoolExecutor) -> Mapping[str, float]:
            pool.submit(lambda: answers.append(ended.wait(20)))
            raise suspend.SuspendError("agent, restore")

        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(suspend, "_Suspension", Stuck)
    with pytest.raises(suspend.SuspendError, match="restore"):
        suspend.measured(tmp_path, [(2, 1)], time.monotonic() + 60)
    assert answers == [True]
