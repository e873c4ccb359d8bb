"""Logs that others write while we read them: whole lines only, of files that may go away."""

import contextlib
from collections.abc import Iterable
from pathlib import Path


def whole_lines(path: Path, since: int = 0) -> list[str]:
    """The lines of a file after that many bytes, but for one that is still being written. None of a file that is not there (any more)."""
    data = b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(since)
        data = file.read()
    return data[: data.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]


def written(paths: Iterable[Path]) -> list[str]:
    """What containers wrote, from their log files as the container runtime lays them out: time, stream, tag, and the container's line."""
    return [line.split(" ", 3)[3] for path in paths for line in whole_lines(path)]
