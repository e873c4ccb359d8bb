"""The client that containers run to register: built from gpu-client.c once, static, without a library beside libc.

A wheel may bring it ready as `gpu-client` beside this module; otherwise `cc` makes it on the node.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from gpumgr.errors import InputError

_SOURCE: Final = Path(__file__).with_name("gpu-client.c")
_READY: Final = Path(__file__).with_name("gpu-client")
_FLAGS: Final = ("-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra")
_COMPILE_TIMEOUT_SECONDS: Final = 120


def build_client(folder: Path) -> Path:
    """The program, for everyone to run: the ready one, or one in `folder` (made if missing), compiled by `cc` (or $CC) the first time.

    Blocks for a second or so. Raises InputError without a C compiler or a static libc, or if the folder can't be written.
    """
    if _READY.exists():
        return _READY
    compiler = os.environ.get("CC", "cc").split()
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((compiler, _FLAGS)).encode()).hexdigest()[:16]
    target = folder / f"gpu-client-{key}"
    if target.exists():
        return target
    if shutil.which(compiler[0]) is None:
        raise InputError(
            f"gpu-client must be compiled and {compiler[0]!r} is not in PATH: install gcc or clang, or set vcuda.client_path"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            command = [*compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_SECONDS)
            fresh.chmod(0o755)
            os.replace(fresh, target)
    except subprocess.SubprocessError as exc:
        detail = exc.stderr.strip() if isinstance(exc, subprocess.CalledProcessError) else str(exc)
        raise InputError(
            f"gpu-client can't be compiled (it needs a static libc; or set vcuda.client_path to one that is ready): {detail}"
        ) from exc
    except OSError as exc:
        raise InputError(f"gpu-client can't be kept in {folder}: {exc.strerror or exc}") from exc
    return target
