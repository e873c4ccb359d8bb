"""NVIDIA's MPS control program, as a stand-in: its commands run in C, since a Python that starts for each would take most of the time."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

#: The program in Python, with the daemon beside it.
FAKE: Final = Path(__file__).parent / "data/enforcement/fake_mps_control.py"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Ends with the process."""
    return tempfile.TemporaryDirectory(prefix="mps-control-")


@functools.cache
def build() -> Path:
    """The program, compiled once in a process."""
    program = Path(_folder().name) / "nvidia-cuda-mps-control"
    named = [f'-DPYTHON="{sys.executable}"', f'-DFAKE="{FAKE}"']
    subprocess.run(["cc", "-std=gnu11", "-O2", *named, "-o", program, FAKE.parents[1] / "mps/control.c"], check=True)
    return program
