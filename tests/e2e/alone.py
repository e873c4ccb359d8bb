"""One builder at a time in a folder of the cache, also with several runs on one machine, or one and `python -m tests.e2e.build`."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_of(folder: Path) -> Path:
    """Beside the folder, since what is in that may be thrown away; the file stays, so that all who wait wait for the same one."""
    return folder.with_name(f"{folder.name}.lock")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Creates the folder and waits for its lock. The system releases the lock when its holder is killed. The lock is not reentrant: a
    holder that enters again waits for ever."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
