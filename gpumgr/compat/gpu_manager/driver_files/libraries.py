"""Finds libraries and programs below a root (the host's, or a driver container's).

Libraries are the ones that `ldconfig -p` prints from the root's cache, which is the list that the loader uses; ldconfig reads every format
of the cache. Without ldconfig or a cache the usual folders are searched.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumgr.compat.gpu_manager.driver_files.root_path import resolve

_LDCONFIG_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
_LDCONFIG_TIMEOUT_SECONDS: Final = 30.0
_CACHE_LINE: Final = re.compile(r"\s+(?P<name>\S+) \((?P<flags>[^)]*)\) => (?P<path>/.*)")
#: ldconfig's name of a library's machine; without one it is i386. Source: glibc, elf/cache.c.
_MARKERS: Final = {"x86-64": "x86-64", "AArch64": "aarch64", "hard-float": "arm", "x32": "x32", "64bit": "ppc64le"}
_LIBRARY_FOLDERS: Final = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/i386-linux-gnu",
    "/usr/lib/arm-linux-gnueabihf",
    "/usr/lib",
    "/usr/lib32",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib/i386-linux-gnu",
    "/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
_BINARY_FOLDERS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/nvidia/bin")
_LIBRARY_NAME: Final = re.compile(r"[^/]+\.so(\.[^/]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One line of a cache. `path` is relative to the root; `machine` None if only the file itself shows it."""

    name: str
    path: str
    machine: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLibrary:
    """One file, as a path without links, and all names by which the loader finds it."""

    path: Path
    names: tuple[str, ...]

    def matches(self, prefixes: Sequence[str]) -> bool:
        return any(name.startswith(tuple(prefixes)) for name in self.names)


def parse_cache(text: str) -> tuple[CacheEntry, ...]:
    """The lines of `ldconfig -p` in their order, which is the loader's. Other lines are left out."""
    return tuple(
        CacheEntry(name=line["name"], path=line["path"], machine=_machine(line["flags"]))
        for line in map(_CACHE_LINE.fullmatch, text.splitlines())
        if line
    )


def _machine(flags: str) -> str | None:
    """From "libc6,x86-64" or "libc6,AArch64, hwcap: …"; plain "libc6" (or "ELF": without a C library) is i386."""
    words = [word.strip() for word in flags.split(",")]
    if words[0] not in ("libc6", "ELF"):
        return None
    return next((_MARKERS[word] for word in words if word in _MARKERS), "i386")


def find_libraries(root: Path, prefixes: Sequence[str], machines: Collection[str]) -> tuple[SharedLibrary, ...]:
    """The root's libraries with names that begin with one of `prefixes`, each file once, in the loader's order.

    Libraries that the cache lists for a machine not in `machines` are left out.
    """
    cached = [entry for entry in parse_cache(_read_cache(root)) if entry.machine is None or entry.machine in machines]
    # A cache without any of them is older than the driver, or the driver's folder is not one of the loader's.
    return _resolve_all(root, _matching(cached, prefixes)) or _resolve_all(root, _matching(_scan(root), prefixes))


def find_binary(root: Path, name: str) -> Path | None:
    """The program that a shell in the root would run, without links in its path."""
    candidates = (resolve(root, f"{folder}/{name}") for folder in _BINARY_FOLDERS)
    return next((path for path in candidates if path and path.stat().st_mode & 0o111), None)


def _matching(entries: Iterable[CacheEntry], prefixes: Sequence[str]) -> list[CacheEntry]:
    return [entry for entry in entries if entry.name.startswith(tuple(prefixes))]


def _resolve_all(root: Path, entries: Iterable[CacheEntry]) -> tuple[SharedLibrary, ...]:
    names: dict[Path, list[str]] = {}
    for entry in entries:
        path = resolve(root, entry.path)
        if path is not None:
            names.setdefault(path, []).append(entry.name)
    return tuple(SharedLibrary(path=path, names=tuple(dict.fromkeys(found))) for path, found in names.items())


def _read_cache(root: Path) -> str:
    """The output of ldconfig; empty without a working ldconfig or a cache."""
    program = shutil.which("ldconfig", path=_LDCONFIG_PATH)
    if program is None:
        return ""
    command = [program, "-p"] if root == Path("/") else [program, "-r", str(root), "-p"]
    environment = {"LC_ALL": "C", "PATH": _LDCONFIG_PATH}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LDCONFIG_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return os.fsdecode(done.stdout)


def _scan(root: Path) -> list[CacheEntry]:
    """Every library in the usual folders, by folder and then by name. Folders that are links to others are listed twice, files are not."""
    entries: list[CacheEntry] = []
    for folder in _LIBRARY_FOLDERS:
        try:
            names = sorted(os.listdir(f"{root}/{folder}"))
        except OSError:
            continue
        entries += [
            CacheEntry(name=name, path=f"{folder}/{name}", machine=None) for name in names if _LIBRARY_NAME.fullmatch(name)
        ]
    return entries
