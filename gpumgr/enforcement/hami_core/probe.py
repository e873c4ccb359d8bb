"""Tests whether a library makes the regions that gpumgr expects, in a separate process, without GPU and driver. Blocks for some 0.1 s."""

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

from gpumgr.enforcement.hami_core.region import FILE_NAME, MEBIBYTE, RegionFile
from gpumgr.enforcement.operator_library import CheckedLibrary, LibraryError, check

#: Functions that a library must export to limit allocations and launches, also of programs that look functions up by name. The last one
#: makes the region.
EXPORTS: Final = (
    *("dlsym", "cuInit", "cuGetProcAddress", "cuMemAlloc_v2", "cuMemAllocManaged", "cuMemCreate", "cuMemFree_v2"),
    *("cuMemGetInfo_v2", "cuDeviceTotalMem_v2", "cuLaunchKernel", "nvmlInit_v2", "get_current_device_memory_limit"),
)
_TIMEOUT_SECONDS: Final = 15.0
_MEMORY_MIB, _CORES_PERCENT = 4660, 37
_PROGRAM: Final = Path(__file__).with_name("load_library.py")
_BUILD: Final = (
    "build HAMi-core 1.2 or newer with its own build.sh (not as Release) on a glibc that is not newer than the agent's and the "
    "containers'"
)


def refusal(library: CheckedLibrary) -> str | None:
    """Why this library can't be used, and what to do; None if it can. Raises LibraryError if the test itself fails."""
    try:
        with tempfile.TemporaryDirectory(prefix="gpumgr-probe-") as folder:
            reason = _probe(library.path, Path(folder))
    except subprocess.TimeoutExpired:
        reason = f"it made no region within {_TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        raise LibraryError(f"{library.path} can't be tried: {error.filename or _PROGRAM}: {error.strerror or error}") from error
    check(library.path, library.sha256)  # the file may have been replaced
    return reason and f"{library.path} is not usable: {reason}: {_BUILD}"


def _probe(path: Path, folder: Path) -> str | None:
    """Raises subprocess.TimeoutExpired, OSError."""
    # Some builds are linked with libcuda.so.1, although they call it by dlsym. The tested library takes the place of libcuda: a real driver
    # could add functions that the tested library lacks.
    (folder / "libcuda.so.1").symlink_to(path.absolute())
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(folder / FILE_NAME),
        "CUDA_DEVICE_MEMORY_LIMIT_0": f"{_MEMORY_MIB}m",
        "CUDA_DEVICE_SM_LIMIT_0": str(_CORES_PERCENT),
        "LIBCUDA_LOG_LEVEL": "0",
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_PROGRAM), str(path)],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        return said[-1] if done.returncode > 0 and said else f"a process that loads it ends with status {done.returncode}"
    return _judge(folder)


def _judge(folder: Path) -> str | None:
    try:
        with closing(RegionFile.open_in(folder)) as region:
            longer, seen = region.cut(), region.read()
    except OSError as error:
        return f"its region can't be used ({error.strerror or error})"
    if longer:
        return f"its region has another layout: it is {longer} bytes longer"
    if seen.problem is not None:
        return f"its region has another layout: {seen.problem}"
    if (seen.limits_bytes[0], seen.core_limits_percent[0]) != (_MEMORY_MIB * MEBIBYTE, _CORES_PERCENT):
        return "its region has the limits at another place"
    return None
