"""Compiles the limiter's C parts: `python -m tools.limiter` puts both libraries, for each architecture that has a compiler here, into
the source tree, where the package looks for them. A build of the package does the same (the build hook of pyproject.toml).

This is the only place that knows the compiler's command; the tests compile with it, too.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PROJECT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = _PROJECT / "gpumgr" / "enforcement" / "limiter"
#: As `uname -m` says them; the cross compilers' names begin with them.
ARCHITECTURES: Final = ("x86_64", "aarch64")
ARBITER: Final = "libgpumgr-arbiter.so"
LIBRARY: Final = "libgpumgr.so"

SHARED: Final = ("-fPIC", "-shared", "-fvisibility=hidden")
_FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-ffile-prefix-map={_PROJECT}=.")
#: glibc 2.17 has these beside libc; newer ones have them for old programs.
_OLD_LIBRARIES: Final = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0")
_LINKS: Final[Mapping[str, Sequence[str]]] = {LIBRARY: ("-Wl,-z,defs", *_OLD_LIBRARIES), ARBITER: ("-Wl,-z,defs",)}


def compiler(architecture: str) -> list[str] | None:
    """The command of the compiler that makes programs for this architecture, or None: there is none here."""
    native = architecture == platform.machine()
    command = os.environ.get("CC", "cc").split() if native else [f"{architecture}-linux-gnu-gcc"]
    return command if shutil.which(command[0]) else None


def compile_program(
    out: Path, sources: Sequence[Path], options: Sequence[str] = (), command: Sequence[str] | None = None
) -> None:
    """Compiles `sources` into the program or library `out`. `command`: of another compiler than this machine's (`compiler`).

    Raises CalledProcessError; the compiler's messages are on stderr.
    """
    command = command or compiler(platform.machine()) or ["cc"]
    subprocess.run([*command, *_FLAGS, *options, "-o", out, *sources, "-ldl", "-lpthread"], check=True)


def compile_library(name: str, folder: Path, options: Sequence[str] = (), command: Sequence[str] | None = None) -> None:
    """Compiles one of our libraries into `folder`."""
    arbiter = SOURCES / "arbiter.c"
    sources = [arbiter] if name == ARBITER else [*(path for path in sorted(SOURCES.glob("*.[cS]")) if path != arbiter)]
    compile_program(folder / name, sources, (*SHARED, *options, *_LINKS[name]), command)


def build() -> list[str]:
    """Puts the libraries as they are shipped into the source tree's package; the architectures without a compiler."""
    lacking = []
    for architecture in ARCHITECTURES:
        folder = SOURCES / "lib" / architecture
        command = compiler(architecture)
        if command is None:
            lacking.append(architecture)
            shutil.rmtree(folder, ignore_errors=True)  # what was built before may be outdated
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            for name in _LINKS:
                compile_library(name, Path(scratch), ("-s",), command)
                # At once: a program that has the old file open keeps it, and another build may run.
                fresh = shutil.copy(Path(scratch) / name, folder / f".{name}.{os.getpid()}")
                os.replace(fresh, folder / name)
    return lacking


def _lack(architectures: Sequence[str]) -> str:
    return "; ".join(
        f"the limiter's libraries for {each} are left out, since there is no C compiler for it here (Debian: apt-get install "
        + ("gcc libc6-dev)" if each == platform.machine() else f"gcc-{each.replace('_', '-')}-linux-gnu)")
        for each in architectures
    )


class Hook(BuildHookInterface[Any]):
    """Hatchling's: compiles before the package's files are collected. An editable installation goes on without a compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (the interface)
        lacking = build()
        if len(lacking) == len(ARCHITECTURES) and version != "editable":
            self.app.abort(_lack(lacking))
        if lacking:
            self.app.display_warning(_lack(lacking))


if __name__ == "__main__":
    missing = build()
    if missing:
        print(_lack(missing), file=sys.stderr)
    sys.exit(len(missing) == len(ARCHITECTURES))
