"""One tenant's files, kept as it was granted, and which of its processes have registered."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import Running
from gpumgr.enforcement.vcuda import files
from gpumgr.enforcement.vcuda.config import pack_config
from gpumgr.enforcement.vcuda.pids import INIT_PID, pack_pids, unpack_pids
from gpumgr.errors import GpumgrError
from gpumgr.usage.containers import Container

#: The host's pids of all processes in a container's cgroup and below; none if it is not known. Blocks for a moment. Raises GpumgrError.
PidsOf = Callable[[Container], Collection[int]]


def parent_of(pid: int, proc_root: Path = Path("/proc")) -> int | None:
    """The host's pid of a process's parent (field 4 of /proc/PID/stat, proc(5)); None if the process is gone."""
    try:
        text = (proc_root / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


class Ward:
    """The folder of one allocation. Every method blocks for some file operations, and threads may call them side by side.

    Pids are read and written under one lock of our own, so that an older look never overwrites a newer one.
    """

    def __init__(self, tenant: Tenant, folder: Path, pids_of: PidsOf) -> None:
        self.tenant = tenant
        self.folder: Final = folder
        self._pids_of = pids_of
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        self._on_gpu: frozenset[int] = frozenset()

    def lay_out(self, tenant: Tenant) -> None:
        """Before the container starts: everything fresh. Raises Refusal for names that don't fit, OSError."""
        with self._lock:
            self.tenant = tenant
            self._registered.clear()
            self._on_gpu = frozenset()
            config = pack_config(tenant)
            files.make_folder(self.folder)
            files.replace(self.folder, files.CONFIG, config)
            files.replace(self.folder, files.PIDS, pack_pids([INIT_PID]))

    def take_over(self) -> None:
        """What an earlier life of the agent left. Who of the pids in the file had registered nobody knows any more: all count.

        Raises Refusal for names that don't fit, OSError.
        """
        with self._lock:
            files.make_folder(self.folder)
            files.replace(self.folder, files.CONFIG, pack_config(self.tenant))
            known = unpack_pids(files.read(self.folder, files.PIDS) or b"")
            self._registered.update(known)
            if not known:
                files.replace(self.folder, files.PIDS, pack_pids([INIT_PID]))

    def keep(self, running: Running) -> None:
        """Both files as they should be now; the same content stays the same file. Raises GpumgrError for names that don't fit and if
        the cgroup can't be read, OSError.

        The pids are read again instead of taken from `running`: a process may have registered since that look, and must stay.
        """
        with self._lock:
            self.tenant = running.tenant
            self._on_gpu = frozenset(running.gpu_processes)
            files.make_folder(self.folder)
            files.replace(self.folder, files.CONFIG, pack_config(running.tenant))
            self._write_pids(running.container, self._pids_of(running.container))

    def register(self, container: Container, callers: Collection[int]) -> None:
        """`callers` are clients that wait for our answer; who started them is about to use the GPU. Raises OSError."""
        with self._lock:
            parents = {parent for pid in callers if (parent := parent_of(pid)) is not None}
            self._registered |= parents.union(callers)
            try:
                found = self._pids_of(container)
            except GpumgrError:  # `keep` meets it each second and has it told
                found = ()
            self._write_pids(container, found, callers)

    def strangers(self, running: Running) -> tuple[int, ...]:
        """Processes with a context on the GPU that have not registered, nor any of their ancestors in the container, ascending.

        A child that did not execute another program has the library of its parent, which registers once.
        """
        with self._lock:
            inside = frozenset(running.pids)
            for pid in running.gpu_processes.keys() - self._registered:
                ancestor: int | None = pid
                while ancestor is not None and ancestor in inside and ancestor not in self._registered:
                    ancestor = parent_of(ancestor)
                if ancestor in inside & self._registered:
                    self._registered.add(pid)
            return tuple(sorted(running.gpu_processes.keys() - self._registered))

    def _write_pids(self, container: Container, found: Collection[int], callers: Collection[int] = ()) -> None:
        """What was found in the container, and `callers`. While nothing can be found there, nobody falls out of the file."""
        pids = set(found)
        if not pids:
            pids.update(unpack_pids(files.read(self.folder, files.PIDS) or b""))
            pids.update(self._registered, [container.pid or INIT_PID])
        pids.update(callers)
        self._registered &= pids
        files.replace(self.folder, files.PIDS, pack_pids(pids, first=self._registered | self._on_gpu))
