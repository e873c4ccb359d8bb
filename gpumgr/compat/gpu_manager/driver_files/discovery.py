"""Finds the driver's files for the volumes of volume.conf (see `volumes`) below a root directory: the host's or a driver container's.

`ldconfig -p` lists the libraries in the root's ld.so.cache, and reads every format of that file. Without ldconfig or a cache the usual
folders are searched.
"""

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from gpumgr.common.elf import ElfError, read_elf
from gpumgr.common.errors import DriverFilesError
from gpumgr.common.files import FileIdentity
from gpumgr.compat.gpu_manager.driver_files.volumes import COMPANION, Source, Volume, version_of

_MAX_LINKS: Final = 40


def resolve(root: Path, path: str) -> Path | None:
    """The regular file that `path` names for a process with this root directory, with symbolic links resolved; None if there is none.
    Absolute links are followed below the root."""
    parts = list(reversed(PurePosixPath(path).parts))
    current = root
    links = 0
    while parts:
        part = parts.pop()
        if part == "/":
            current = root
        elif part == "..":
            current = current.parent if current != root else root
        else:
            current = current / part
            target = _link(current)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    return None
                current = current.parent
                parts += reversed(PurePosixPath(target).parts)
    return current if is_file(current) else None


def is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _link(current: Path) -> str | None:
    try:
        return os.readlink(current)
    except OSError:
        return None


_LDCONFIG_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
_LDCONFIG_TIMEOUT_SECONDS: Final = 30.0
_CACHE_LINE: Final = re.compile(r"\s+(?P<name>\S+) \((?P<flags>[^)]*)\) => (?P<path>/.*)")
#: ldconfig's word for a library's machine -> the machine. A library without such a word is for i386. Source: glibc, elf/cache.c.
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


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ld.so.cache. `path` is the path below the root. `machine` is None if only the ELF file shows the machine."""

    name: str
    path: str
    machine: str | None


def parse_cache(text: str) -> tuple[CacheEntry, ...]:
    """The output of `ldconfig -p`, in the loader's order; lines of another form are left out."""
    return tuple(
        CacheEntry(name=line["name"], path=line["path"], machine=_machine(line["flags"]))
        for line in map(_CACHE_LINE.fullmatch, text.splitlines())
        if line
    )


def _machine(flags: str) -> str | None:
    """The machine in "libc6,x86-64" or "libc6,AArch64, hwcap: …"; "libc6" or "ELF" alone is i386. None: unknown."""
    words = [word.strip() for word in flags.split(",")]
    if words[0] not in ("libc6", "ELF"):
        return None
    return next((_MARKERS[word] for word in words if word in _MARKERS), "i386")


def find_libraries(root: Path, prefixes: Sequence[str], machines: Collection[str]) -> tuple[Source, ...]:
    """The root's libraries with names that begin with one of `prefixes`, in the loader's order. Libraries that the cache lists for other
    machines are left out. Raises OSError, DriverFilesError."""
    cached = [entry for entry in parse_cache(_read_cache(root)) if entry.machine is None or entry.machine in machines]
    # A cache without such a library is older than the driver, or the loader does not search the driver's folder.
    return _resolve_all(root, _matching(cached, prefixes)) or _resolve_all(root, _matching(_scan(root), prefixes))


def find_binary(root: Path, name: str) -> Path | None:
    """The path of the program that a shell in the root would run, with symbolic links resolved."""
    candidates = (resolve(root, f"{folder}/{name}") for folder in _BINARY_FOLDERS)
    return next((path for path in candidates if path and path.stat().st_mode & 0o111), None)


def _matching(entries: Iterable[CacheEntry], prefixes: Sequence[str]) -> list[CacheEntry]:
    return [entry for entry in entries if entry.name.startswith(tuple(prefixes))]


def _resolve_all(root: Path, entries: Iterable[CacheEntry]) -> tuple[Source, ...]:
    names: dict[Path, list[str]] = {}
    for entry in entries:
        path = resolve(root, entry.path)
        if path is not None:
            names.setdefault(path, []).append(entry.name)
    return tuple(inspect(path, path.name, names=found) for path, found in names.items())


def _read_cache(root: Path) -> str:
    command = ["ldconfig", "-p"] if root == Path("/") else ["ldconfig", "-r", str(root), "-p"]
    environment = {"LC_ALL": "C", "PATH": _LDCONFIG_PATH}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LDCONFIG_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return os.fsdecode(done.stdout)


def _scan(root: Path) -> list[CacheEntry]:
    """The libraries in the usual folders, by folder and name. Folders that link to each other list a library twice."""
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


_LIBCUDA = "libcuda.so"


class VolumeSources(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one volume. `missing`: names in the volume's lists for which there is no file."""

    libraries: tuple[Source, ...]
    binaries: tuple[Source, ...]
    missing: tuple[str, ...]


class DriverInstallation(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's files below one root."""

    root: Path
    libraries: tuple[Source, ...]

    def select(self, volume: Volume) -> VolumeSources:
        binaries = {name: find_binary(self.root, name) for name in volume.binaries}
        missing = [name for name, path in binaries.items() if path is None]
        missing += [prefix for prefix in volume.libraries if not any(library.matches([prefix]) for library in self.libraries)]
        return VolumeSources(
            libraries=tuple(library for library in self.libraries if library.matches(volume.libraries)),
            binaries=tuple(inspect(path, name) for name, path in binaries.items() if path),
            missing=tuple(missing),
        )


def find_driver(roots: Sequence[Path], volumes: Sequence[Volume], *, machine: str, driver_version: str) -> DriverInstallation:
    """The driver's files below the first root that has libcuda of this driver version and machine. Raises DriverFilesError, OSError."""
    prefixes = tuple(dict.fromkeys([_LIBCUDA, *(prefix for volume in volumes for prefix in volume.libraries)]))
    machines = {machine, COMPANION.get(machine, machine)}
    others: list[str] = []
    for root in roots:
        libraries = find_libraries(root, prefixes, machines)
        for library in (each for each in libraries if each.matches([_LIBCUDA])):
            # A file without a version in its name is accepted.
            if library.elf and library.elf.machine == machine and version_of(library.name) in (None, driver_version):
                return DriverInstallation(root=root, libraries=libraries)
            others.append(f"{library.path} ({library.elf.machine if library.elf else 'not an ELF file'})")
    raise DriverFilesError(
        f"libcuda.so.{driver_version} for {machine}, the library of the loaded driver, is not below {' or '.join(map(str, roots))}"
        f"{'; there is ' + ', '.join(others) if others else ''}: install the libraries of this driver, "
        "or load the driver of these libraries (after an update: reboot)"
    )


def inspect(path: Path, name: str, *, names: Iterable[str] = ()) -> Source:
    """`name`: the file's name in the mirror. Raises OSError, DriverFilesError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DriverFilesError(f"{path} is not a regular file")
    try:
        elf = read_elf(path)
    except ElfError:
        elf = None
    return Source(name=name, path=path, identity=FileIdentity.of(status), mode=status.st_mode, elf=elf, names=tuple(names))


def sha256_of(path: Path) -> str:
    """Hex digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
