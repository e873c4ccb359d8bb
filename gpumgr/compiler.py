"""Programs and libraries of ours that are written in C: made by the machine's own compiler once, and kept."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpumgr.errors import InputError

_TIMEOUT_SECONDS: Final = 120


def compiled(
    source: Path, flags: Sequence[str], *, folder: Path, suffix: str = "", what: str, needs: str = "a C compiler", remedy: str
) -> Path:
    """What `cc` (or $CC) makes of `source` with `flags`, for everyone to read and run: in `folder` (made if missing), under a name with
    the hash of all that went into it.

    Blocks for a second or so the first time. Raises InputError, in which it is called `what`, without a compiler, if that refuses, or if
    the folder can't be written; `needs` is what it takes, `remedy` what else helps.
    """
    compiler = os.environ.get("CC", "cc").split()
    key = hashlib.sha256(source.read_bytes() + repr((compiler, flags)).encode()).hexdigest()[:16]
    target = folder / f"{source.stem}-{key}{suffix}"
    if target.exists():
        return target
    if shutil.which(compiler[0]) is None:
        raise InputError(f"{what} needs {needs} and {compiler[0]!r} is not in PATH: install gcc or clang, or {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            command = [*compiler, *flags, "-o", str(fresh), str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
            fresh.chmod(0o755)
            os.replace(fresh, target)
    except subprocess.SubprocessError as exc:
        detail = exc.stderr.strip() if isinstance(exc, subprocess.CalledProcessError) else str(exc)
        raise InputError(f"{what} can't be compiled (it needs {needs}; or {remedy}): {detail}") from exc
    except OSError as exc:
        raise InputError(f"{what} can't be kept in {folder}: {exc.strerror or exc}") from exc
    return target
