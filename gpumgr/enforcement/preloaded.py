"""The common base of the limiter and hami-core, where each process of a container preloads a library.

The container mounts three things: the installed library, a file /etc/ld.so.preload that names the library, and the files of the
allocation's folder. The agent checks the files of this folder.
"""

import asyncio
import shutil
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.files import names_in
from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import Backend, finding, listed
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.operator_library import (
    PRELOAD,
    CheckedLibrary,
    LibraryError,
    install_preloaded,
    installed_path,
    make_folder,
)
from gpumgr.ledger.answer import Mount
from gpumgr.ledger.gpu_share import GpuShare, Strength
from gpumgr.ledger.ledger import AllocationId

#: Containers start concurrently, each on a thread of its own.
_INSTALLING: Final = threading.Lock()


class Monitor:
    """Checks the files of one start of a container. Any thread may call the methods.

    `files`, `file`: in messages, the names of these files and of the files that replace them at the next start. `obstacle`: why the limits
    that were last checked or restored are not in force; None: they are.
    """

    def __init__(self, files: str, file: str) -> None:
        self._names = files, file
        self.obstacle: str | None = None
        self._lock, self._closed = threading.Lock(), False
        self._reported: set[str] = set()
        #: Host pid -> consecutive checks in which the process used the GPU without the library.
        self._unseen: dict[int, int] = {}

    @abstractmethod
    def close(self) -> None:
        """Closes the files, also if called again; later checks do nothing."""

    def _is_first(self, what: str) -> bool:
        """Whether this is the first report of `what`."""
        new = what not in self._reported
        self._reported.add(what)
        return new

    def _broken(self, tenant: GpuShare, reason: str) -> Iterator[Finding]:
        """Reports once that the files can't be used."""
        if self._is_first("broken"):
            files, file = self._names
            message = (
                f"the limits of {tenant.describe()} can't be monitored: {files} can't be used ({reason}); "
                f"restart the container, which gets {file} at every start"
            )
            yield finding(tenant, "broken", message)

    def _tampered(self, tenant: GpuShare, found: Sequence[str]) -> Finding:
        message = f"{tenant.describe()} changed its limits in {self._names[0]}: {listed(found)}; restored. Check what runs in it"
        return finding(tenant, "tampered", message)

    def _outside(self, tenant: GpuShare, pids: Iterable[int], checks: int, without: str) -> Iterator[Finding]:
        """Reports processes without the library (its name: `without`) after `checks` consecutive checks."""
        self._unseen = {pid: self._unseen.get(pid, 0) + 1 for pid in pids}
        if late := [f"process {pid}" for pid, count in self._unseen.items() if count == checks]:
            message = (
                f"{tenant.describe()} uses the GPU without {without} and its limits in {listed(late)}: the program is linked "
                f"statically or to musl, or loads the driver by itself, or the library's folder on the node is mounted noexec (stderr says "
                f"so); use a dynamically linked glibc image, a folder without noexec, or another backend"
            )
            yield finding(tenant, "unregistered", message)


_M = TypeVar("_M", bound=Monitor)


class PreloadedBackend(Backend, Generic[_M]):
    """`path_in_container`: the library in containers. `library_dir`: the installed libraries, on a disk, since a container's mounts name
    them also after a reboot. `folder`: on a tmpfs, with a folder for each allocation. If `volumes` is None, containers can fill the
    tmpfs."""

    limits: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}
    adjustable = True

    def __init__(self, path_in_container: Path, library_dir: Path, folder: Path, volumes: BoundedFolders | None) -> None:
        self._path_in_container, self._library_dir = path_in_container, library_dir
        self._folder, self._volumes = folder, volumes
        self._monitors: dict[AllocationId, _M] = {}

    def remains(self) -> Collection[AllocationId]:
        return names_in(self._folder)

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        return await asyncio.to_thread(self._observe, tuple(running)) if running else ()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        monitors = {each.tenant.allocation: self._monitors.get(each.tenant.allocation) for each in running}
        return {name: each.obstacle for name, each in monitors.items() if each is not None and each.obstacle is not None}

    async def cleanup(self, allocation: AllocationId) -> None:
        await asyncio.to_thread(self._cleanup, allocation)

    async def close(self) -> None:
        monitors, self._monitors = self._monitors, {}
        for monitor in monitors.values():
            monitor.close()

    def _library_mounts(self, checked: CheckedLibrary) -> tuple[Mount, Mount]:
        """Installs the library and returns its mounts. At the container's start it may be too late: if the agent was updated before, the
        new agent installs only its own version, and the runtime would make a folder at the path of a missing file."""
        with suppress(LibraryError, OSError):  # the container's start reports the error
            self._install(checked)
        library = installed_path(self._library_dir, checked.sha256, self._path_in_container.name)
        return (
            Mount(container_path=str(self._path_in_container), host_path=str(library), read_only=True),
            Mount(container_path="/etc/ld.so.preload", host_path=str(library.with_name(PRELOAD)), read_only=True),
        )

    # -- on a thread -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Returns new findings."""

    def _install(self, library: CheckedLibrary) -> None:
        """Raises LibraryError or OSError."""
        with _INSTALLING:
            install_preloaded(library, self._library_dir, self._path_in_container.name, str(self._path_in_container))

    def _new_folder(self, allocation: AllocationId) -> Path:
        """Raises OSError."""
        # The closed monitor of the former start stays in `_monitors` until it is replaced: a running check must not open other files.
        if (old := self._monitors.get(allocation)) is not None:
            old.close()
        folder = self._folder / allocation
        for each in (self._folder, folder):
            make_folder(each, 0o711)
        if self._volumes is not None:
            self._volumes.renew(folder)
        return folder

    def _cleanup(self, allocation: AllocationId) -> None:
        if (monitor := self._monitors.pop(allocation, None)) is not None:
            monitor.close()
        if self._volumes is not None:
            self._volumes.remove(self._folder / allocation)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder / allocation)
