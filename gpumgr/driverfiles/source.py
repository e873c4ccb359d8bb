"""Files as the mirror sees them before it is made: which file exactly, and what kind."""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gpumgr.driverfiles.elf import Elf, ElfError, read_elf
from gpumgr.driverfiles.errors import DriverFilesError

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells one content of a file from the next without reading it. No ctime: a hard link changes it."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of the host. `name`: what it is called in the mirror. `elf` None: no ELF file, and `not_elf` says why.

    `sha256` is known for files that the operator supplies; None for the driver's.
    """

    name: str
    path: Path
    identity: Identity
    mode: int
    elf: Elf | None = None
    not_elf: str = ""
    sha256: str | None = None


def inspect(path: Path, name: str) -> Source:
    """Raises OSError, and DriverFilesError if it is no regular file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DriverFilesError(f"{path} is not a regular file")
    elf, not_elf = None, ""
    try:
        elf = read_elf(path)
    except ElfError as error:
        not_elf = str(error)
    return Source(name=name, path=path, identity=Identity.of(status), mode=status.st_mode, elf=elf, not_elf=not_elf)


def sha256_of(path: Path) -> str:
    """Hex digits. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
