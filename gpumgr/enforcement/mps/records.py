"""What gpumgr keeps on disk about MPS: the node's protocol, and for each GPU with a daemon a record `<state_dir>/mps/<gpu uuid>`.

A record has the daemon's folder and the compute mode that the GPU had before. It is not in the daemon's folder, because a restart of the
agent may find another enforcement.run_dir or an emptied one: the agent would then take its own compute mode for the former one, and
start a second daemon for the GPU. A boot ends daemons and resets compute modes, so records of an earlier boot are ignored.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from gpumgr.common.files import replace_file
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.enforcement.mps.commands import PROTOCOLS, MpsProtocol
from gpumgr.enforcement.mps.folders import GPU_UUID, names_in

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PROTOCOL_NAME: Final = "mps_protocol"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`former_mode`: NVML's number; None while gpumgr has not changed the mode."""

    boot: str
    folder: str
    former_mode: int | None = None


class DaemonRecords:
    """Read once and written through: only the agent writes there."""

    def __init__(self, root: Path) -> None:
        """Raises OSError."""
        self._root, self._boot = root, boot_id()
        found = {name: self._read(root / name) for name in names_in(root, GPU_UUID)}
        self._known = {uuid: record for uuid, record in found.items() if record is not None}

    def uuids(self) -> list[str]:
        return sorted(self._known)

    def of(self, uuid: str) -> Record | None:
        return self._known.get(uuid)

    def begin(self, uuid: str, folder: Path, former_mode: int | None = None) -> None:
        """Makes a record unless the GPU has one. Raises OSError."""
        if uuid not in self._known:
            self._put(uuid, Record(boot=self._boot, folder=str(folder), former_mode=former_mode))

    def set_former_mode(self, uuid: str, mode: int | None) -> None:
        """For a GPU with a record. Raises OSError."""
        self._put(uuid, replace(self._known[uuid], former_mode=mode))

    def drop(self, uuid: str) -> None:
        """Raises OSError."""
        (self._root / uuid).unlink(missing_ok=True)
        self._known.pop(uuid, None)

    def _put(self, uuid: str, record: Record) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        replace_file(self._root / uuid, msgspec.json.encode(record), durable=False)  # a record of an earlier boot is ignored
        self._known[uuid] = record

    def _read(self, path: Path) -> Record | None:
        """None for a record of another boot or an unreadable one; records of this boot are complete."""
        try:
            record = decode_json(path.read_bytes(), Record)
        except UnreadableText:
            return None
        return record if record.boot == self._boot else None


def boot_id() -> str:
    """Raises OSError."""
    return _BOOT.read_text().strip()


def read_protocol(state_dir: Path) -> MpsProtocol | None:
    """The node's protocol; None if there is no valid record. Raises OSError."""
    try:
        return PROTOCOLS.get((state_dir / _PROTOCOL_NAME).read_text().strip())
    except FileNotFoundError:
        return None


def write_protocol(state_dir: Path, protocol: MpsProtocol) -> None:
    """Durable, because containers keep their protocol over a reboot. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    replace_file(state_dir / _PROTOCOL_NAME, f"{protocol}\n")
