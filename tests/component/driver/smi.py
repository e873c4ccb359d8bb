"""A replacement of nvidia-smi on a simulated node."""

import sys
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "data/nvml/fake_nvidia_smi.py"


def install_smi(folder: Path) -> str:
    """Its path. It runs with this Python; the variable FAKE_SMI_NODE has to name the node's folder."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {_SOURCE} "$@"\n')
    program.chmod(0o755)
    return str(program)
