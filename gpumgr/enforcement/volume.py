"""A tmpfs of limited size for each region: a container can enlarge the file of its region, and must not take the space of other containers.

The container's runtime mounts the file on the host, so the tmpfs must be mounted on the host, too. It is if the agent runs in the
host's mount namespace, or in a pod with "Bidirectional" propagation of run_dir. In the sandbox of a unit, systemd is asked to mount it.
Functions block. Source: mount(2), mount_namespaces(7).
"""

import ctypes
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from gpumgr.common.files import names_in
from gpumgr.enforcement.mps.launcher import best_method, outside
from gpumgr.ledger.ledger import AllocationId

#: The size fits the region and some pages.
_OPTIONS: Final = "mode=711,size=2560k,nr_inodes=8"
_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
_DETACH: Final = 2
#: The agent makes fewer mounts than this on one folder.
_MOST_MOUNTS: Final = 8
_SYSTEMD_SECONDS: Final = 10.0

log = structlog.get_logger(__name__)


class BoundedFolders:
    """Without the right to mount, files are in plain folders: an enlarged file uses space of run_dir until the agent cuts it."""

    def __init__(self) -> None:
        self._logged = False

    def renew(self, folder: Path) -> None:
        """Mounts an empty tmpfs at the folder, which has the allocation's name. The former tmpfs stays while its container has the file.

        The name of the mount's source is in the mount table of each process with a file of the tmpfs. Raises OSError.
        """
        self.remove(folder)
        source = f"gpumgr-{folder.name}"
        reason = "mounts of the agent do not reach the host"
        for mount in (
            partial(_call, "mount", source.encode(), os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, _OPTIONS.encode()),
            partial(_ask_systemd, "mount", "-t", "tmpfs", "-o", f"nosuid,nodev,noexec,{_OPTIONS}", source, str(folder)),
        ):
            try:
                mount()
                if _on_host(folder):
                    return
                self.remove(folder)
            except OSError as error:
                reason = str(error)
        if not self._logged:
            log.warning("container_files_not_bounded", reason=reason)
        self._logged = True

    def remove(self, folder: Path) -> None:
        """Unmounts what `renew` mounted. Raises OSError."""
        if not folder.exists():  # another mechanism's folder may have the same name
            return
        for _ in range(_MOST_MOUNTS):
            if not folder.is_mount():
                break
            try:
                _call("umount2", os.fsencode(folder), _DETACH)
            except PermissionError:
                _ask_systemd("umount", "--lazy", str(folder))
        if _on_host(folder):  # the agent sees the host's mounts, but its own changes do not reach the host
            _ask_systemd("umount", "--lazy", str(folder))


def _on_host(folder: Path) -> bool:
    """Whether the host has the folder's mount; False if the agent may not read the host's mounts."""
    try:
        return f" gpumgr-{folder.name} " in Path("/proc/1/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False


def unbounded(folder: Path) -> list[AllocationId]:
    """The allocations with files in plain folders; `folder` has one for each allocation. Raises OSError."""
    return [name for name in names_in(folder) if not (folder / name).is_mount() and not _on_host(folder / name)]


def _call(name: str, *arguments: bytes | int) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _ask_systemd(*command: str) -> None:
    """Raises OSError."""
    argv = outside("systemd", command) if best_method() == "systemd" else None
    if argv is None:
        raise PermissionError("the agent may not mount, and systemd does not run: mount run_dir with Bidirectional propagation")
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SYSTEMD_SECONDS)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
