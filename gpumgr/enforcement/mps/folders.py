"""The folder of one GPU's daemon: `<run_dir>/mps/<gpu uuid>/` with pipe, log, shm and tenants (the shares of its containers).

run_dir is on a tmpfs: these files end with the boot, as the daemons do.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gpumgr.common.files import replace_file
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.enforcement.mps.commands import SERVER
from gpumgr.ledger.ledger import AllocationId

_LONGEST: Final = ("pipe/control_privileged", f"pipe/{SERVER}/{'0' * 16}/control")
_TAIL_BYTES: Final = 4096
GPU_UUID: Final = re.compile(r"GPU-[0-9A-Za-z-]+\Z")
_ALLOCATION = re.compile(r"[0-9A-Za-z_]+\Z")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a container was granted; `cores` in percent."""

    cores: int
    memory_bytes: int


class GpuFolder:
    def __init__(self, root: Path) -> None:
        self.root, self.pipe, self.log, self.shm = root, root / "pipe", root / "log", root / "shm"
        self._tenants = root / "tenants"

    def namespace(self, allocation: AllocationId) -> Path:
        """Folder of the container's socket in protocol 3."""
        return self.pipe / SERVER / allocation

    def make(self) -> None:
        """Makes the folders, open to all users: a server may run as its client's user. Raises OSError."""
        for folder in (self.root.parent, self.root, self.pipe, self.log, self._tenants, self.shm):
            if not folder.is_dir():
                folder.mkdir(parents=True)
                folder.chmod(0o1777 if folder == self.shm else 0o755)  # independent of the umask

    def clear_pipe(self) -> None:
        """Removes the files of a daemon that ended, but no folder: containers have folders mounted. Raises OSError."""
        for folder, below, names in os.walk(self.pipe):
            links = [name for name in below if os.path.islink(os.path.join(folder, name))]
            for name in (*names, *links):
                os.unlink(os.path.join(folder, name))

    def ended_by_command(self, pid: int) -> bool:
        """Whether the log of this daemon ends as after the command `quit`; a crash or a signal writes no such line. Containers do not
        have the log. Raises OSError."""
        try:
            with (self.log / "control.log").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                tail = file.read(_TAIL_BYTES)
        except FileNotFoundError:
            return False
        return re.search(rb"Control\s+(?:\w+\s+)?%d\] Exit with status 0" % pid, tail) is not None

    def remove(self) -> None:
        """Removes the folder, in which `shm` must not be a mount. Raises OSError."""
        if self.root.exists():
            shutil.rmtree(self.root)

    # -- shares ------------------------------------------------------------------------------------------------------------

    def allocations(self) -> list[AllocationId]:
        """The containers on record. Raises OSError if they can't be read, which does not mean that there are none."""
        return names_in(self._tenants, _ALLOCATION)

    def shares(self) -> Mapping[AllocationId, Share]:
        """Those with a readable record. Raises OSError."""
        found: dict[AllocationId, Share] = {}
        for allocation in self.allocations():
            path = self._tenants / allocation
            try:
                with contextlib.suppress(FileNotFoundError):
                    found[allocation] = decode_json(path.read_bytes(), Share)
            except UnreadableText as error:
                log.warning("mps_record_unreadable", path=str(path), error=str(error))
        return found

    def put(self, allocation: AllocationId, share: Share) -> None:
        """Raises OSError."""
        replace_file(self._tenants / allocation, msgspec.json.encode(share), durable=False)  # on a tmpfs

    def drop(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        (self._tenants / allocation).unlink(missing_ok=True)


def gpu_folders(root: Path) -> Iterator[tuple[str, GpuFolder]]:
    """uuid and folder of each GPU that has a folder. Raises OSError."""
    return ((name, GpuFolder(root / name)) for name in names_in(root, GPU_UUID) if (root / name).is_dir())


def names_in(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    """The names in a folder that match, sorted; none if it is missing. Raises OSError."""
    try:
        return sorted(name for name in os.listdir(folder) if pattern.match(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def socket_path_bytes(root: Path) -> int:
    """Bytes of the longest socket path below this root."""
    uuid = f"GPU-{'0' * 36}"
    return max(len(os.fsencode(root / uuid / name)) for name in _LONGEST)
