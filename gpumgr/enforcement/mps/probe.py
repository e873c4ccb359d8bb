"""Tries MPS once: a daemon on an idle GPU is started, limited, asked and ended, before any container depends on it.

The help text of the control program says what it should be able to do; only a daemon shows whether it can (a missing library, a driver
without memory limits, a GPU that MPS does not support). The result is on disk and counts for this program and this boot; after a boot the
former one counts until the next try has ended.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gpumgr.enforcement.mps.commands import MpsProtocol
from gpumgr.enforcement.mps.daemon import Daemon, DaemonConfig
from gpumgr.enforcement.mps.folders import GpuFolder, Share
from gpumgr.enforcement.mps.launcher import LaunchMethod
from gpumgr.enforcement.mps.records import DaemonRecords, boot_id
from gpumgr.errors import MpsError, MpsTransientError
from gpumgr.files import replace_file

#: A failure is tried again after this time.
RETRY_SECONDS: Final = 600.0
_ALLOCATION: Final = "probe"
_SHARE: Final = Share(cores=50, memory_bytes=1 << 30)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """`program`: what was tried, see `identify`. `failure`: None if it works."""

    program: str
    boot: str
    failure: str | None = None

    @property
    def of_this_boot(self) -> bool:
        return self.boot == boot_id()


def identify(program: Path, protocol: MpsProtocol, method: LaunchMethod) -> str:
    """Path, file and protocol: another file has another inode or time. Raises OSError."""
    seen = Path("/proc/1/root") / program.relative_to("/") if method == "host" else program
    status = seen.stat()
    return f"{program} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_mtime_ns} protocol {protocol}"


def read_result(state_dir: Path) -> ProbeResult | None:
    """The last result; None without one. Raises OSError."""
    try:
        return msgspec.json.decode((state_dir / "mps_probe").read_bytes(), type=ProbeResult)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def last_try(state_dir: Path, program: Path, protocol: MpsProtocol, method: LaunchMethod) -> ProbeResult | None:
    """The last result with this program; None without one. Raises OSError."""
    result = read_result(state_dir)
    return result if result is not None and result.program == identify(program, protocol, method) else None


def write_result(state_dir: Path, result: ProbeResult) -> None:
    """Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    replace_file(state_dir / "mps_probe", msgspec.json.encode(result))


async def try_daemon(uuid: str, root: Path, state_dir: Path, config: DaemonConfig) -> str | None:
    """Why MPS does not work on this idle GPU; None if it does. The compute mode stays. Raises MpsTransientError."""
    try:
        await end_leftover(root, state_dir, config)
        daemon = _daemon(uuid, root, state_dir, config)
        try:
            await daemon.admit(_ALLOCATION, _SHARE)
            await daemon.remove(_ALLOCATION)
        finally:
            await daemon.vacate()
    except MpsTransientError:
        raise
    except (MpsError, OSError) as error:
        return f"an MPS daemon was tried on GPU {uuid} and does not work: {error}"
    return None


async def end_leftover(root: Path, state_dir: Path, config: DaemonConfig) -> None:
    """Ends the daemon of a probe that ended with its agent. Raises MpsError, OSError."""
    for uuid in DaemonRecords(state_dir / "mps_probing").uuids():
        await _daemon(uuid, root, state_dir, config).vacate()


def _daemon(uuid: str, root: Path, state_dir: Path, config: DaemonConfig) -> Daemon:
    """It has a folder and a record of its own, so that no other part takes it for a daemon of containers."""
    records = DaemonRecords(state_dir / "mps_probing")
    return Daemon(uuid, GpuFolder(root / "probe"), records, replace(config, exclusive=False))
