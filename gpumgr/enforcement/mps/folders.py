"""What gpumgr keeps on disk about MPS: a folder and a record for each GPU with a daemon, and the node's protocol.

The folder `<run_dir>/mps/<gpu uuid>/` has pipe, log, shm and tenants (the shares of its containers). run_dir is on a tmpfs, so a reboot
removes these files, as it ends the daemons. A JSON file that can't be decoded is reported and counts as missing, but `allocations` lists
its name.

The record `<state_dir>/mps/<gpu uuid>` has the daemon's folder and the GPU's compute mode before MPS. It is not below run_dir, because a
restarted agent may have another run_dir. Without the record that agent would take the mode that gpumgr has set for the mode before MPS, and
start a second daemon. A boot ends daemons and resets compute modes, so records of an earlier boot are ignored.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.files import names_in, replace_file
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import Process
from gpumgr.enforcement.mps.commands import PROTOCOLS, SERVER, MpsProtocol
from gpumgr.ledger.ledger import AllocationId

#: The longest paths of sockets below a GPU's folder.
_LONGEST: Final = ("pipe/control_privileged", f"pipe/{SERVER}/{'0' * 16}/control")
_TAIL_BYTES: Final = 4096
GPU_UUID: Final = re.compile(r"GPU-[0-9A-Za-z-]+\Z")
_ALLOCATION = re.compile(r"[0-9A-Za-z_]+\Z")

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a container was granted; `cores` in percent. Only in protocol 3: `older` has the processes from before the last change, each
    with its memory limit; `former_bytes`, during a change, is the largest memory limit that a program may have got before."""

    cores: int
    memory_bytes: int
    older: tuple[tuple[Process, int], ...] = ()
    former_bytes: int | None = None

    @property
    def limits(self) -> tuple[int, int]:
        return self.cores, self.memory_bytes

    def with_older(self, older: Mapping[Process, int], former_bytes: int | None = None) -> Self:
        return replace(self, older=tuple(older.items()), former_bytes=former_bytes)


class GpuFolder:
    def __init__(self, root: Path) -> None:
        self.root, self.pipe, self.log, self.shm = root, root / "pipe", root / "log", root / "shm"
        self._tenants = root / "tenants"

    def namespace(self, allocation: AllocationId) -> Path:
        """The folder of the container's socket in protocol 3."""
        return self.pipe / SERVER / allocation

    def make(self) -> None:
        """Makes the folders, open to all users: a server may run as its client's user. Raises OSError."""
        for folder in (self.root.parent, self.root, self.pipe, self.log, self._tenants, self.shm):
            if not folder.is_dir():
                folder.mkdir(parents=True)
                folder.chmod(0o1777 if folder == self.shm else 0o755)  # independent of the umask

    def clear_pipe(self) -> None:
        """Removes an ended daemon's files. Keeps its folders, because containers may have mounted them. Raises OSError."""
        for folder, below, names in os.walk(self.pipe):
            links = [name for name in below if os.path.islink(os.path.join(folder, name))]
            for name in (*names, *links):
                os.unlink(os.path.join(folder, name))

    def ended_by_command(self, pid: int) -> bool:
        """Whether the command `quit` ended this daemon, according to its log, which containers can't write. Raises OSError."""
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
        """The containers on record. Raises OSError, which does not mean that there are none."""
        return sorted(name for name in names_in(self._tenants) if _ALLOCATION.match(name))

    def shares(self) -> Mapping[AllocationId, Share]:
        """The shares with a readable record. Raises OSError."""
        return {name: share for name in self.allocations() if (share := read_record(self._tenants / name, Share)) is not None}

    def put(self, allocation: AllocationId, share: Share) -> None:
        """Raises OSError."""
        replace_file(self._tenants / allocation, msgspec.json.encode(share), durable=False)  # on a tmpfs

    def drop(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        (self._tenants / allocation).unlink(missing_ok=True)


def gpu_folders(root: Path) -> Iterator[tuple[str, GpuFolder]]:
    """Raises OSError."""
    return ((name, GpuFolder(root / name)) for name in names_in(root) if GPU_UUID.match(name) and (root / name).is_dir())


def read_record(path: Path, kind: type[T]) -> T | None:
    """None if the file is missing, or can't be decoded, which is logged. Raises OSError."""
    try:
        return decode_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except UnreadableText as error:
        log.warning("mps_record_unreadable", path=str(path), error=str(error))
        return None


def socket_path_bytes(root: Path) -> int:
    """The size of the longest socket path below this root."""
    uuid = f"GPU-{'0' * 36}"
    return max(len(os.fsencode(root / uuid / name)) for name in _LONGEST)


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PROTOCOL_NAME: Final = "mps_protocol"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`former_mode`: the compute mode before MPS, in NVML's numbers; None while gpumgr has not changed the mode."""

    boot: str
    folder: str
    former_mode: int | None = None


class DaemonRecords:
    """The records of all daemons: read once, because only the agent changes them, and written at every change."""

    def __init__(self, root: Path) -> None:
        """Raises OSError."""
        self._root, self._boot = root, _BOOT.read_text().strip()
        found = {name: read_record(root / name, Record) for name in names_in(root) if GPU_UUID.match(name)}
        self._known = {uuid: record for uuid, record in found.items() if record is not None and record.boot == self._boot}

    def uuids(self) -> list[str]:
        return sorted(self._known)

    def of(self, uuid: str) -> Record | None:
        return self._known.get(uuid)

    def begin(self, uuid: str, folder: Path, former_mode: int | None = None) -> None:
        """Makes the GPU's record if it has none. Raises OSError."""
        if uuid not in self._known:
            self._put(uuid, Record(boot=self._boot, folder=str(folder), former_mode=former_mode))

    def set_former_mode(self, uuid: str, mode: int | None) -> None:
        """The GPU must have a record. Raises OSError."""
        self._put(uuid, replace(self._known[uuid], former_mode=mode))

    def drop(self, uuid: str) -> None:
        """Raises OSError."""
        (self._root / uuid).unlink(missing_ok=True)
        self._known.pop(uuid, None)

    def _put(self, uuid: str, record: Record) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        replace_file(self._root / uuid, msgspec.json.encode(record), durable=False)  # a record of an earlier boot is ignored
        self._known[uuid] = record


def read_protocol(state_dir: Path) -> MpsProtocol | None:
    """The node's protocol; None without a valid record. Raises OSError."""
    try:
        return PROTOCOLS.get((state_dir / _PROTOCOL_NAME).read_text().strip())
    except FileNotFoundError:
        return None


def write_protocol(state_dir: Path, protocol: MpsProtocol) -> None:
    """Durable, because containers keep their protocol over a reboot. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    replace_file(state_dir / _PROTOCOL_NAME, f"{protocol}\n")
