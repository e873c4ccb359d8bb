"""Checks a shared library for containers (the operator's, or gpumgr's own), and installs it in a folder with its SHA-256 as the name.

Containers mount the installed copy, so a changed original does not affect running containers. All functions block.
"""

import functools
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from gpumgr.common.elf import ET_DYN, KERNEL_NAMES, ElfError, read_exports, read_header
from gpumgr.common.errors import GpumgrError
from gpumgr.common.files import FileIdentity, replace_file, replacing

#: A file beside an installed library, which containers get as /etc/ld.so.preload.
PRELOAD: Final = "ld.so.preload"


class LibraryError(GpumgrError):
    """A library can't be used or installed. The text says which, why, and what to do."""


class CheckedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """`sha256`: lower-case hex."""

    path: Path
    sha256: str


def check(path: Path, sha256: str | None, *, exports: Collection[str] = ()) -> CheckedLibrary:
    """Checks that the library is readable, made for this machine, has this SHA-256 (None: any), and exports these symbols.

    Raises LibraryError, also for an error of the disk.
    """
    try:
        with _reading(path) as file:
            _check_elf(path, file.fileno())
            found = _digest(path, FileIdentity.of(os.fstat(file.fileno())))
            missing = sorted(set(exports) - read_exports(file.fileno())) if exports else ()
    except ElfError as error:
        raise LibraryError(f"{path} has a damaged table of symbols: build the library again") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if sha256 is not None and found != sha256.lower():
        raise LibraryError(
            f"{path} has SHA-256 {found}, but {sha256.lower()} is set: put the right file there, or set the SHA-256 of the new one"
        )
    if missing:
        raise LibraryError(
            f"{path} does not export {', '.join(missing)}, so it would not limit programs: put a build with visible symbols there "
            "(HAMi-core: with its own build.sh, not as Release)"
        )
    return CheckedLibrary(path=path, sha256=found)


def installed_path(folder: Path, sha256: str, name: str) -> Path:
    return folder / sha256.lower() / name


def install(checked: CheckedLibrary, folder: Path, name: str) -> Path:
    """Copies the library below `folder`, atomically and with mode 0755; keeps an intact copy. Raises LibraryError.

    A file that a container may have mapped is never written to.
    """
    target = installed_path(folder, checked.sha256, name)
    if _is_installed(target, checked.sha256):
        return target
    try:
        make_folder(target.parent)
        with _reading(checked.path) as source, replacing(target, mode=0o755) as descriptor:
            with open(descriptor, "rb+", closefd=False) as copy:
                shutil.copyfileobj(source, copy)
                copy.seek(0)
                found = hashlib.file_digest(copy, "sha256").hexdigest()
            if found != checked.sha256:
                raise LibraryError(f"{checked.path} changed while it was copied (SHA-256 {found}); the next start retries")
    except OSError as error:
        raise LibraryError(f"can't install {checked.path} as {target}: {error.strerror or error}") from error
    return target


def install_preloaded(checked: CheckedLibrary, folder: Path, name: str, path_in_container: str) -> None:
    """Installs a library and, beside it, the file ld.so.preload that names it. Raises LibraryError, OSError."""
    preload = install(checked, folder, name).with_name(PRELOAD)
    content = f"{path_in_container}\n".encode()
    if not preload.is_file() or preload.read_bytes() != content:
        replace_file(preload, content)


def make_folder(folder: Path, mode: int = 0o755) -> None:
    """Makes the folder with exactly this mode. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    """Opens the regular file; a FIFO does not block. Raises LibraryError; reading may raise OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LibraryError(f"{path} is not a regular file; put the library itself there")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> LibraryError:
    return LibraryError(f"can't read the library {path}: {error.strerror or error}; put it there, readable for gpumgr")


def _check_elf(path: Path, descriptor: int) -> None:
    try:
        header = read_header(descriptor)
    except ElfError as error:
        raise LibraryError(f"{path} {error}; put the shared library there") from error
    host = platform.machine()
    if (header.bits, header.order) != (64, "<"):
        raise LibraryError(f"{path} is not a 64-bit little-endian ELF file; build the library for {host}")
    if header.kind != ET_DYN:
        raise LibraryError(f"{path} is an ELF file, but not a shared library")
    if header.machine != KERNEL_NAMES.get(host):
        raise LibraryError(f"{path} is built for {header.machine}, this host is {host}: build it for this host")


@functools.lru_cache(maxsize=32)
def _digest(path: Path, identity: FileIdentity) -> str:  # noqa: ARG001
    """Cached while the file's identity stays the same. Raises LibraryError, OSError."""
    with _reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_installed(target: Path, sha256: str) -> bool:
    try:
        with _reading(target) as file:
            found = os.fstat(file.fileno())
            return stat.S_IMODE(found.st_mode) == 0o755 and _digest(target, FileIdentity.of(found)) == sha256
    except (LibraryError, OSError):
        return False
