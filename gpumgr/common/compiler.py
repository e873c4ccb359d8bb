"""Compiles gpumgr's C programs and libraries on this machine, once, and keeps the results."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpumgr.common.errors import InputError

_TIMEOUT_SECONDS: Final = 120


def compiled(
    source: Path, flags: Sequence[str], *, folder: Path, suffix: str = "", what: str, needs: str = "a C compiler", remedy: str
) -> Path:
    """Returns the path of the compiled `source` in `folder`. The first call compiles it with $CC (default `cc`), in about a second. The
    file's name has a hash of the source, the compiler and the flags. All users may execute the file.

    Raises InputError without a compiler, or if compiling or writing fails. For its message: `what` names the result, `needs` the
    prerequisite, and `remedy` an alternative.
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
        raise InputError(f"{what} can't be stored in {folder}: {exc.strerror or exc}") from exc
    return target
