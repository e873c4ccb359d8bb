"""A shared library that the operator supplies and pins by its SHA-256: checked, then installed in a folder named by its hash.

Containers mount the installed copy, so a change of the original does not affect running ones. All functions block: call them on a
thread.
"""

import functools
import hashlib
import os
import platform
import shutil
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

from gpumgr.errors import GpumgrError
from gpumgr.files import FileIdentity, replacing

#: ELF header, System V ABI chapter 4: e_ident[0:4], [EI_CLASS], [EI_DATA]; then e_type at 16 and e_machine at 18, two bytes each.
_ELF_MAGIC: Final = b"\x7fELF"
_ELF_CLASS_64: Final = 2
_ELF_LITTLE_ENDIAN: Final = 1
_ELF_SHARED_OBJECT: Final = 3
_ELF_HEADER_BYTES: Final = 64
#: The kernel's name of a machine -> e_machine of its programs.
_ELF_MACHINE: Final = {"x86_64": 62, "aarch64": 183}
_MACHINE_NAME: Final = {62: "x86-64", 183: "arm64"}
#: Offsets of e_shoff (8 bytes) and e_shnum (2 bytes); a section header (its type, offset, size and sh_link are fields 1, 4, 5 and 6); the
#: type of the table of exported symbols; and a symbol: name, binding and type, visibility, section (0: not defined here), value, size.
_SECTIONS_AT, _SECTION_COUNT_AT = 40, 60
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_DYNSYM: Final = 11
_SYMBOL: Final = struct.Struct("<IBBHQQ")


class LibraryError(GpumgrError):
    """The operator's library can't be used. The text says which file, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLibrary:
    """A library for this machine with this SHA-256 (lower-case hex)."""

    path: Path
    sha256: str


def check(path: Path, sha256: str | None, *, exports: Collection[str] = ()) -> CheckedLibrary:
    """The library at `path`, if it is readable, made for this machine, has this SHA-256 (None: any), and exports these symbols. Digest and
    symbols of an unchanged file are cached.

    Raises LibraryError, also for an error of the disk.
    """
    try:
        with _reading(path) as file:
            _check_elf(path, file.read(_ELF_HEADER_BYTES))
            identity = FileIdentity.of(os.fstat(file.fileno()))
            found = _digest(path, identity)
    except OSError as error:
        raise _unreadable(path, error) from error
    if sha256 is not None and found != sha256.lower():
        raise LibraryError(
            f"{path} has SHA-256 {found}, but {sha256.lower()} is set: put the right file there, or set the SHA-256 of the new one"
        )
    if exports and (missing := sorted(set(exports) - _exported(path, identity))):
        raise LibraryError(
            f"{path} does not export {', '.join(missing)}, so it would not limit programs: put a build that exports them there"
        )
    return CheckedLibrary(path=path, sha256=found)


def installed_path(folder: Path, sha256: str, name: str) -> Path:
    """The path at which `install` puts a library. Reads no file."""
    return folder / sha256.lower() / name


def install(checked: CheckedLibrary, folder: Path, name: str) -> Path:
    """Copies the library below `folder`, atomically and with mode 0755, and returns the path. Raises LibraryError.

    An intact copy is kept. A file that a container may have mapped is never written to.
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


def make_folder(folder: Path) -> None:
    """Makes the folder with mode 0755, independent of the umask. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


@contextmanager
def _reading(path: Path) -> Iterator[BufferedReader]:
    """The regular file at `path`; a FIFO does not block. Raises LibraryError; reading may raise OSError."""
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


def _check_elf(path: Path, header: bytes) -> None:
    if len(header) < _ELF_HEADER_BYTES or header[:4] != _ELF_MAGIC:
        raise LibraryError(f"{path} is not an ELF file; put the shared library there")
    if header[4] != _ELF_CLASS_64 or header[5] != _ELF_LITTLE_ENDIAN:
        raise LibraryError(f"{path} is not a 64-bit little-endian ELF file; build the library for {platform.machine()}")
    if int.from_bytes(header[16:18], "little") != _ELF_SHARED_OBJECT:
        raise LibraryError(f"{path} is an ELF file, but not a shared library")
    machine, host = int.from_bytes(header[18:20], "little"), platform.machine()
    if host not in _ELF_MACHINE:
        raise LibraryError(f"this host is {host}; libraries like {path} are supported on x86_64 and aarch64")
    if machine != _ELF_MACHINE[host]:
        built_for = _MACHINE_NAME.get(machine, f"ELF machine {machine}")
        raise LibraryError(f"{path} is built for {built_for}, this host is {host}: build it for this host")


@functools.lru_cache(maxsize=32)
def _digest(path: Path, identity: FileIdentity) -> str:
    """SHA-256 of the file's content, cached while the file's identity stays the same. Raises LibraryError, OSError."""
    with _reading(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        if FileIdentity.of(os.fstat(file.fileno())) != identity:
            raise LibraryError(f"{path} changes while it is read; move a complete file there instead of writing to it")
    return digest.hexdigest()


@functools.lru_cache(maxsize=32)
def _exported(path: Path, identity: FileIdentity) -> frozenset[str]:  # noqa: ARG001
    """The symbols that other programs can use, cached while the file's identity stays the same. Raises LibraryError."""
    with _reading(path) as file:
        content = file.read()
    try:
        (start,) = struct.unpack_from("<Q", content, _SECTIONS_AT)
        (count,) = struct.unpack_from("<H", content, _SECTION_COUNT_AT)
        sections = [_SECTION.unpack_from(content, start + n * _SECTION.size) for n in range(count)]
        found = set()
        for _, kind, _, _, offset, size, link, *_ in sections:
            strings = sections[link][4]
            for name, info, _, section, _, _ in _SYMBOL.iter_unpack(content[offset : offset + size] if kind == _DYNSYM else b""):
                if section and info >> 4:  # defined, and not local
                    found.add(content[strings + name : content.index(b"\0", strings + name)].decode(errors="replace"))
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise LibraryError(f"{path} has a damaged table of symbols: build the library again") from error
    return frozenset(found)


def _is_installed(target: Path, sha256: str) -> bool:
    try:
        with _reading(target) as file:
            found = os.fstat(file.fileno())
            return stat.S_IMODE(found.st_mode) == 0o755 and _digest(target, FileIdentity.of(found)) == sha256
    except (LibraryError, OSError):
        return False
