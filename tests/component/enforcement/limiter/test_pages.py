"""Pages that a tenant damages: fuzzers of the arbiter and of the library, under AddressSanitizer and UndefinedBehaviorSanitizer.

The same seed gives the same damage. With GPUMGR_FUZZ_SECONDS they go on for so long, with the seeds that follow.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import ADDRESSES, GPU_BYTES, PROGRAMS, preloaded, sanitized
from tools.limiter import LIBRARY, SOURCES, compile_library, compile_program

_SECONDS = int(os.environ.get("GPUMGR_FUZZ_SECONDS", "0"))

pytestmark = pytest.mark.timeout(2 * _SECONDS + 300)


def _fuzz(name: str, folder: Path, rounds: int, environment: Mapping[str, str]) -> None:
    compile_program(folder / name, [PROGRAMS / f"{name}.c"], [f"-I{SOURCES}", *sanitized(ADDRESSES)])
    command = [str(folder / name), "1", str(rounds), str(_SECONDS)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    reports = "".join(path.read_text(errors="replace") for path in folder.glob("sanitizer.*"))
    assert (done.returncode, done.stdout, reports) == (0, "", "")


def test_the_arbiter_stands_a_damaged_page_and_keeps_the_neighbours_share(tmp_path: Path) -> None:
    _fuzz("fuzz_arbiter", tmp_path, 10, preloaded([], tmp_path, ADDRESSES))


def test_the_library_stands_damaged_pages(programs: Path, tmp_path: Path) -> None:
    compile_library(LIBRARY, tmp_path, ['-DPLACE="pages/"', *sanitized(ADDRESSES)])
    (tmp_path / "pages").mkdir()
    subprocess.run([programs / "make_gpu", "gpu", "1", str(GPU_BYTES)], cwd=tmp_path, check=True)
    subprocess.run([programs / "make_clock", "clock"], cwd=tmp_path, check=True)
    environment = preloaded([programs / "libclock.so", tmp_path / LIBRARY], tmp_path, ADDRESSES)
    files = {"LD_LIBRARY_PATH": str(programs), "FAKE_GPU": "gpu", "MODEL_CLOCK": "clock"}
    _fuzz("fuzz_library", tmp_path, 10, {**environment, **files})
