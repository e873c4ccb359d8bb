"""A program that stands in for nvidia-smi on a simulated node."""

import sys
from pathlib import Path

import pytest

from gpumgr.sim.library import SimNode

_SOURCE = Path(__file__).parents[2] / "data/nvml/fake_nvidia_smi.py"


def install_smi(folder: Path, sim: SimNode, patch: pytest.MonkeyPatch) -> str:
    """Its path. It runs with this Python and knows the node."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {_SOURCE} "$@"\n')
    program.chmod(0o755)
    patch.setenv("FAKE_SMI_NODE", str(sim.sysfs_root.parent))
    return str(program)
