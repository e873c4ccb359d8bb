"""Replaces files atomically and durably, and compares them without reading them."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self


class FileIdentity(NamedTuple):
    """Changes when a file is replaced or written to. The inode's change time is not used, because a hard link or a chmod also changes
    it."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """Follows links; None if the file can't be examined."""
        try:
            return cls.of(os.stat(path))
        except OSError:
            return None


def replace_file(path: Path, content: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Writes `content` (text as UTF-8) to `path`, see `replacing`. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[int]:
    """Yields a descriptor (read and write) of a new file with exactly `mode`, which replaces `path` atomically at the end. If the body
    raises, `path` stays as it was.

    With `durable`, content and name survive a power loss; without it, they survive only a crash of the process (enough on a tmpfs).
    Only one writer may replace a path at a time. Raises OSError.
    """
    new = temporary_of(path)
    with suppress(FileNotFoundError):  # a killed process may have left it, and O_EXCL refuses an existing file
        new.unlink()
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            yield descriptor
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, path)
    except BaseException:
        with suppress(FileNotFoundError):
            new.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Raises OSError, also if the file is not regular or has more than `most_bytes`. Opening a FIFO does not block."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def names_in(folder: Path) -> list[str]:
    """Empty if the folder does not exist. Raises OSError."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def temporary_of(path: Path) -> Path:
    """The file that `replacing` writes to. If the process is killed, this file remains."""
    return path.with_name(f".{path.name}.new")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
