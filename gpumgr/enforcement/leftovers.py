"""Which allocations' folders are still mounted somewhere: the sure sign that a container with them lives."""

import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

#: A process that ended under our eyes, or a zombie, which has no mounts any more.
_ENDED: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})


def mounted(names: Collection[str], proc_root: Path = Path("/proc")) -> frozenset[str]:
    """Those of `names` that are part of a path in any process's mounts. Blocks for some milliseconds; each mount namespace is read
    once, or, without CAP_SYS_PTRACE, once for each process in it.

    Raises OSError where a process is hidden from us: then any of them may be mounted.
    """
    found: set[str] = set()
    for text in _mount_tables(proc_root):
        found |= {name for name in names if name in text}
        if len(found) == len(names):
            break
    return frozenset(found)


def _mount_tables(proc_root: Path) -> Iterator[str]:
    entries = [entry for entry in os.listdir(proc_root) if entry.isdigit()]
    if "1" not in entries:  # proc(5): with hidepid= a listing has no more than what we may trace
        raise PermissionError(errno.EPERM, "the processes of others are hidden", str(proc_root))
    seen: set[str] = set()
    for entry in entries:
        namespace = _namespace(proc_root / entry)
        if namespace in seen:
            continue
        try:
            yield (proc_root / entry / "mountinfo").read_text(errors="replace")
        except OSError as error:
            if error.errno not in _ENDED:
                raise
        else:
            if namespace is not None:
                seen.add(namespace)


def _namespace(process: Path) -> str | None:
    """Its mount namespace. None: it takes the right to trace the process to see that, and mostly none to read its mounts."""
    try:
        return os.readlink(process / "ns/mnt")
    except OSError:
        return None
