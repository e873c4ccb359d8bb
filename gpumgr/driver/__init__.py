"""NVML: sessions, calls on threads with time limits, snapshots, samples, health, MIG."""

from pathlib import Path

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Where NVML, sysfs and proc are. `library_path` None: the system's loader finds NVML. `simulated`: these are a simulated node's, which
    has no kernel module and no device nodes."""

    library_path: str | None = None
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    simulated: bool = False
