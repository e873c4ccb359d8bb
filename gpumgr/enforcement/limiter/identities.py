"""What identifies a process of a container: its pid namespace, and its pid there. The library writes both into the process's slot."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpumgr.common.proc import PROC
from gpumgr.enforcement.pids import NspidOf


class Identity(NamedTuple):
    """`namespace`: the inode of the innermost pid namespace."""

    namespace: int
    pid: int


class Identities:
    """`nspid_of` returns a process's pid in its innermost pid namespace (None: gone)."""

    def __init__(self, nspid_of: NspidOf, proc_root: Path = PROC) -> None:
        self._nspid_of, self._proc_root = nspid_of, proc_root

    def of(self, host_pid: int) -> Identity | None:
        """The identity of this process; None: the process is gone, or hidden from the agent."""
        try:
            namespace = os.stat(self._proc_root / str(host_pid) / "ns" / "pid").st_ino
        except OSError:
            return None
        inside = self._nspid_of(host_pid)
        return None if inside is None else Identity(namespace, inside)

    def all(self) -> Iterator[Identity]:
        """Every process of the host that the agent may see. Raises OSError."""
        for name in os.listdir(self._proc_root):
            if name.isdecimal() and (found := self.of(int(name))) is not None:
                yield found
