"""The files from which a mirror is made."""

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path

from gpumgr.common.elf import Elf, ElfError, read_elf
from gpumgr.common.errors import DriverFilesError
from gpumgr.common.files import FileIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of the host. `name`: its name in the mirror. `elf` None: not an ELF file, with the reason in `not_elf`.

    `sha256` is known for files that the operator supplies; None for the driver's.
    """

    name: str
    path: Path
    identity: FileIdentity
    mode: int
    elf: Elf | None = None
    not_elf: str = ""
    sha256: str | None = None


def inspect(path: Path, name: str) -> Source:
    """Raises OSError, and DriverFilesError if it is not a regular file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DriverFilesError(f"{path} is not a regular file")
    elf, not_elf = None, ""
    try:
        elf = read_elf(path)
    except ElfError as error:
        not_elf = str(error)
    return Source(name=name, path=path, identity=FileIdentity.of(status), mode=status.st_mode, elf=elf, not_elf=not_elf)


def sha256_of(path: Path) -> str:
    """Hex digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
