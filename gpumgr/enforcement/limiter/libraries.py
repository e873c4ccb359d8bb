"""Finds the limiter's libraries in the package. They are compiled when the package is built (tools/limiter.py)."""

import platform
from pathlib import Path
from typing import Final

from gpumgr.common.errors import InputError

#: LIBRARY is for containers, ARBITER for the agent itself.
LIBRARY: Final = "libgpumgr.so"
ARBITER: Final = "libgpumgr-arbiter.so"


def library_path(name: str) -> Path:
    """The file of LIBRARY or ARBITER for this machine's architecture. Raises InputError if the package was built without it."""
    machine = platform.machine()
    path = Path(__file__).with_name("lib") / machine / name
    if not path.is_file():
        raise InputError(
            f"this installation of gpumgr has no {name} for {machine} ({path} is missing): build the package where a C compiler for "
            f"{machine} is installed, or, in a source tree, install one and run `make libraries`"
        )
    return path
