"""Writes the settings file of a migration; never overwrites another file."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Literal

from gpumgr.errors import InputError
from gpumgr.settings import check_settings


def write_settings(path: Path, text: str) -> Literal["written", "unchanged"]:
    """Creates the file, and missing folders above it. Raises InputError if a different file exists, or if it cannot be written."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.read_text(encoding="utf-8") == text:
                return "unchanged"
            raise InputError(f"{path} is there already and says something else; move it away, or name another file with --to")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(_write_beside(path, text))
        try:
            problems = check_settings(new)
            if problems:
                raise InputError("\n".join(map(str, problems)))
            os.link(new, path)  # unlike rename, link never replaces a file that was created in between
        finally:
            new.unlink()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be written: {error}; name another file with --to") from error
    return "written"


def _write_beside(path: Path, text: str) -> str:
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(file, "w", encoding="utf-8") as out:
        out.write(text)
        os.fchmod(out.fileno(), 0o644)
        out.flush()
        os.fsync(out.fileno())
    return name
