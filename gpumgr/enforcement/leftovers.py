"""Which allocations' folders are still mounted somewhere: the sure sign that a container with them lives."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def mounted(names: Collection[str], proc_root: Path = Path("/proc")) -> frozenset[str]:
    """Those of `names` that are part of a path in any process's mounts. Blocks for some milliseconds; each mount namespace is read
    once."""
    found: set[str] = set()
    for text in _mount_tables(proc_root):
        found |= {name for name in names if name in text}
        if len(found) == len(names):
            break
    return frozenset(found)


def _mount_tables(proc_root: Path) -> Iterator[str]:
    seen: set[str] = set()
    for entry in os.listdir(proc_root):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            namespace = os.readlink(proc_root / entry / "ns/mnt")
            if namespace not in seen:
                yield (proc_root / entry / "mountinfo").read_text(errors="replace")
                seen.add(namespace)
