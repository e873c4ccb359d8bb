"""Which GPUs have a daemon, where its folder is, and which compute mode the GPU had before: `<state_dir>/mps/<gpu uuid>`.

Not in the daemon's own folder: enforcement.run_dir may be another after a restart of the agent, or somebody may empty it. Then the mode
that the agent finds would be its own, kept for ever as the one before, and a second daemon would be started for the GPU.

A boot ends daemons and compute modes, so records of another boot count for nothing.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`former_mode`: NVML's number; None while the mode is not ours."""

    folder: Path
    former_mode: int | None = None


class Records:
    """Read once and written through: nobody else writes there while the agent runs."""

    def __init__(self, root: Path) -> None:
        """Raises OSError."""
        self._root, self._boot = root, _BOOT.read_text().strip()
        names = sorted(os.listdir(root)) if root.is_dir() else []
        found = {name: self._read(root / name) for name in names if _UUID.match(name)}
        self._known = {uuid: record for uuid, record in found.items() if record is not None}

    def uuids(self) -> list[str]:
        return sorted(self._known)

    def of(self, uuid: str) -> Record | None:
        return self._known.get(uuid)

    def begin(self, uuid: str, folder: Path, former_mode: int | None = None) -> None:
        """Unless there is one. Raises OSError."""
        if uuid not in self._known:
            self._put(uuid, Record(folder=folder, former_mode=former_mode))

    def set_former_mode(self, uuid: str, mode: int | None) -> None:
        """Of a GPU that has a record. Raises OSError."""
        self._put(uuid, replace(self._known[uuid], former_mode=mode))

    def drop(self, uuid: str) -> None:
        """Raises OSError."""
        (self._root / uuid).unlink(missing_ok=True)
        self._known.pop(uuid, None)

    def _put(self, uuid: str, record: Record) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        beside = self._root / f".{uuid}.new"
        beside.write_text(json.dumps({"boot": self._boot, "folder": str(record.folder), "former_mode": record.former_mode}))
        os.replace(beside, self._root / uuid)
        self._known[uuid] = record

    def _read(self, path: Path) -> Record | None:
        """None: of another boot, or unreadable, which no record of this boot is: each is put in its place when it is complete."""
        try:
            read = json.loads(path.read_bytes())
            mode = read["former_mode"]
            record = Record(folder=Path(read["folder"]), former_mode=None if mode is None else int(mode))
            return record if read["boot"] == self._boot else None
        except (ValueError, KeyError, TypeError):
            return None
