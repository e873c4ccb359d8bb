"""Compiles the limiter's C parts: `python -m tools.limiter` puts both libraries, for each architecture that has a compiler here, into
the source tree, where the package looks for them. A build of the package does the same (the build hook of pyproject.toml).

Only this module knows the compiler's command. The tests use it too.
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
#: The names that `uname -m` prints. The names of the cross compilers begin with them.
ARCHITECTURES: Final = ("x86_64", "aarch64")
ARBITER: Final = "libgpumgr-arbiter.so"
LIBRARY: Final = "libgpumgr.so"

SHARED: Final = ("-fPIC", "-shared", "-fvisibility=hidden")
_FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-ffile-prefix-map={_PROJECT}=.")
#: Functions that glibc before 2.34 has in libraries beside libc (old_glibc.h). Newer versions keep these libraries for old programs.
_OLD_LIBRARIES: Final = {
    "libdl.so.2": ("dlopen", "dlvsym", "dladdr"),
    "libpthread.so.0": ("pthread_create", "pthread_detach", "pthread_once", "pthread_key_create", "pthread_setspecific"),
}
_FIRST_VERSIONS: Final = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
_LINKS: Final[Mapping[str, Sequence[str]]] = {LIBRARY: ("-Wl,-z,defs", "-Wl,--no-as-needed"), ARBITER: ("-Wl,-z,defs",)}


def compiler(architecture: str) -> list[str] | None:
    """The command of the compiler for this architecture; None if it is not installed."""
    native = architecture == platform.machine()
    command = os.environ.get("CC", "cc").split() if native else [f"{architecture}-linux-gnu-gcc"]
    return command if shutil.which(command[0]) else None


def compile_program(
    out: Path, sources: Sequence[Path], options: Sequence[str] = (), command: Sequence[str] | None = None
) -> None:
    """Compiles `sources` into the program or library `out`. `command` is the compiler (default: this machine's, see `compiler`).

    Raises CalledProcessError; the compiler's messages are on stderr.
    """
    command = command or compiler(platform.machine()) or ["cc"]
    subprocess.run([*command, *_FLAGS, *options, "-o", out, *sources, "-ldl", "-lpthread"], check=True)


def compile_library(name: str, folder: Path, options: Sequence[str] = (), command: Sequence[str] | None = None) -> None:
    """Compiles one of our libraries into `folder`."""
    arbiter = SOURCES / "arbiter.c"
    sources = [arbiter] if name == ARBITER else [*(path for path in sorted(SOURCES.glob("*.[cS]")) if path != arbiter)]
    # The sanitizers' libraries define some of these functions too. Linked with both, the library can't be loaded.
    old_glibc = name == LIBRARY and not any(option.startswith("-fsanitize") for option in options)
    with tempfile.TemporaryDirectory() as scratch:
        old = _old_libraries(Path(scratch), command) if old_glibc else []
        compile_program(folder / name, [*sources, *old], (*SHARED, *options, *_LINKS[name]), command)


def _old_libraries(folder: Path, command: Sequence[str] | None) -> list[Path]:
    """Libraries to link with, which have the names and functions of the old glibc's libraries. The loader looks for a function only in the
    library in which the linker found it."""
    architecture = next((each for each in ARCHITECTURES if command and command[0].startswith(each)), platform.machine())
    libraries = []
    for name, functions in _OLD_LIBRARIES.items():
        source, versions = folder / f"{name}.c", folder / f"{name}.map"
        source.write_text("".join(f"void {function}(void);\nvoid {function}(void) {{}}\n" for function in functions))
        versions.write_text(
            f"{_FIRST_VERSIONS[architecture]} {{ global: {' '.join(f'{each};' for each in functions)} local: *; }};\n"
        )
        links = (f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", "-nostdlib", "-fno-builtin")
        subprocess.run(
            [*(command or compiler(architecture) or ["cc"]), "-fPIC", "-shared", *links, "-o", folder / name, source], check=True
        )
        libraries.append(folder / name)
    return libraries


def build() -> list[str]:
    """Compiles the shipped libraries into the package in the source tree. Returns the architectures without a compiler."""
    lacking = []
    for architecture in ARCHITECTURES:
        folder = SOURCES / "lib" / architecture
        command = compiler(architecture)
        if command is None:
            lacking.append(architecture)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier build may be outdated
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            for name in _LINKS:
                compile_library(name, Path(scratch), ("-s",), command)
                # The file is replaced atomically: a program keeps the old file that it has open, and another build may run.
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
    """Hatchling calls it before it collects the package's files. An editable installation needs no compiler."""

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
