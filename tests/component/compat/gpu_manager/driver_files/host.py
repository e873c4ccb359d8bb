"""Roots with a driver in them: real libraries, made by the C compiler, and a cache made by ldconfig."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.unit.compat.gpu_manager.driver_files.elves import elf

DRIVER = "535.54.03"
NEXT_DRIVER = "550.90"
MACHINE = {"x86_64": "x86-64"}.get(platform.machine(), platform.machine())
#: What `who` of a library answers.
SHIM, CUDA, ML, PTX, NEXT_CUDA = 99, 1, 2, 3, 11
_LDCONFIG_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_LIB = Path("usr/lib64")


def compile_library(target: Path, who: int, soname: str | None = None) -> Path:
    """A library with a function `who`. It needs no C library, so that it loads anywhere."""
    source = f"int who(void) {{ return {who}; }}\n"
    name = [f"-Wl,-soname,{soname}"] if soname else []
    command = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-nostdlib", *name, "-x", "c", "-o", str(target), "-"]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True, timeout=60)
    return target


def call_who(folder: Path, *names: str) -> list[int]:
    """What the libraries answer in a process that finds them through LD_LIBRARY_PATH, as a container's does."""
    script = "import ctypes, sys; print(*(ctypes.CDLL(name).who() for name in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={"LD_LIBRARY_PATH": str(folder), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [int(word) for word in done.stdout.split()]


class Driver:
    """Compiled once: the driver's libraries in two versions, and the shim."""

    def __init__(self, folder: Path) -> None:
        self.shim = compile_library(folder / "shim.so", SHIM)
        self.libraries = {
            DRIVER: {
                "libcuda": compile_library(folder / "cuda.so", CUDA, "libcuda.so.1"),
                "libnvidia-ml": compile_library(folder / "ml.so", ML, "libnvidia-ml.so.1"),
                "libnvidia-ptxjitcompiler": compile_library(folder / "ptx.so", PTX, "libnvidia-ptxjitcompiler.so.1"),
            }
        }
        self.libraries[NEXT_DRIVER] = self.libraries[DRIVER] | {
            "libcuda": compile_library(folder / "next.so", NEXT_CUDA, "libcuda.so.1")
        }

    def install(self, root: Path, version: str = DRIVER) -> None:
        """Replaces what is installed, as a package does: new files under new names, old ones removed."""
        folder = root / _LIB
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("libcuda.so*"), *folder.glob("libnvidia-*")]:
            old.unlink()
        for stem, built in self.libraries[version].items():
            shutil.copy(built, folder / f"{stem}.so.{version}")
            (folder / f"{stem}.so.1").symlink_to(f"/usr/lib64/{stem}.so.{version}")
        programs = root / "usr" / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        for name, content in (("nvidia-smi", elf(MACHINE)), ("nvidia-debugdump", b"#!/bin/sh\n")):
            (programs / name).write_bytes(content)
            (programs / name).chmod(0o755)
        make_cache(root)


def make_cache(root: Path) -> None:
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "ld.so.conf").write_text(f"/{_LIB}\n")
    ldconfig = shutil.which("ldconfig", path=_LDCONFIG_PATH)
    assert ldconfig, "these tests need ldconfig, which is part of the C library's package"
    subprocess.run([ldconfig, "-r", str(root)], check=True, capture_output=True, timeout=30)
