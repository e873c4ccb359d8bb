"""Which versions of the mirror containers have mounted."""

import errno
import os
import re
from pathlib import Path
from typing import Final

from gpumgr.driverfiles.errors import DriverFilesError
from gpumgr.driverfiles.mirror import VERSIONS

#: Where a mount comes from, within its own file system: only the end of the path is ours to know.
_VERSION: Final = re.compile(rf"/{re.escape(VERSIONS)}/([^/\s]+)")
_ROOT_FIELD: Final = 3
#: A process that ended under our eyes, or a zombie, which has no mounts any more.
_ENDED: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})


def versions_in(mountinfo: str) -> frozenset[str]:
    """From the text of /proc/<pid>/mountinfo, whose fourth field is the path that a mount shows. Source: proc(5)."""
    roots = (fields[_ROOT_FIELD] for line in mountinfo.splitlines() if len(fields := line.split(" ")) > _ROOT_FIELD)
    return frozenset(found[1] for root in roots if (found := _VERSION.search(root)))


def versions_in_use(proc_root: Path) -> frozenset[str]:
    """Of all processes; each mount namespace is read once. `proc_root` must show the host's processes.

    Raises DriverFilesError: then nothing may be called unused.
    """
    seen: set[str] = set()
    versions: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir(proc_root)):
        namespace = _namespace(proc_root / pid)
        if namespace in seen:
            continue
        try:
            versions |= versions_in((proc_root / pid / "mountinfo").read_text(errors="surrogateescape"))
            if namespace is not None:
                seen.add(namespace)
        except OSError as error:
            if error.errno not in _ENDED:
                raise DriverFilesError(
                    f"can't see the mounts of process {pid}: {error.strerror or error}; the agent must run as root"
                ) from error
    return frozenset(versions)


def _namespace(process: Path) -> str | None:
    """Its mount namespace. None: it takes the right to trace the process to see that, and none to read its mounts."""
    try:
        return os.readlink(process / "ns" / "mnt")
    except OSError:
        return None
