"""Tries MPS once: a daemon on an idle GPU is started, limited and ended, before any container depends on it.

The help text of the control program says what MPS should be able to do. Only a daemon shows whether that works: a library may be missing,
the driver may have no memory limits, MPS may not support the GPU. The result is on disk and counts for this program and this boot. After a
boot the former result counts until the next trial has ended.
"""

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.errors import MpsError, MpsTransientError
from gpumgr.common.files import replace_file
from gpumgr.enforcement.mps.commands import MpsProtocol
from gpumgr.enforcement.mps.daemon import Daemon, DaemonConfig
from gpumgr.enforcement.mps.folders import DaemonRecords, GpuFolder, Share, boot_id, read_record
from gpumgr.enforcement.mps.launcher import LaunchMethod

#: A failure is tried again after this time.
RETRY_SECONDS: Final = 600.0
RESULT_NAME: Final = "mps_probe"
_RECORDS_NAME: Final = "mps_probing"
_ALLOCATION: Final = "probe"
_SHARE: Final = Share(cores=50, memory_bytes=1 << 30)

log = structlog.get_logger(__name__)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """`program`: what was tried, see `identify`. `failure`: why MPS does not work; None if it works."""

    program: str
    boot: str
    failure: str | None = None


def identify(program: Path, protocol: MpsProtocol, method: LaunchMethod) -> str:
    """Identifies what is tried by the program's path, its file and the protocol: another file has another inode or time. Raises OSError."""
    seen = Path("/proc/1/root") / program.relative_to("/") if method == "host" else program
    try:
        status = seen.stat()
    except FileNotFoundError:
        if method != "host":
            raise
        return f"{program} protocol {protocol}"  # an absolute link of the host, which leads elsewhere in the agent's pod
    return f"{program} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_mtime_ns} protocol {protocol}"


def last_result(state_dir: Path, program: str) -> ProbeResult | None:
    """The last result with this program; None if there is none. Raises OSError."""
    result = read_record(state_dir / RESULT_NAME, ProbeResult)
    return result if result is not None and result.program == program else None


async def try_daemon(uuid: str, root: Path, state_dir: Path, config: DaemonConfig) -> None:
    """Tries MPS on this idle GPU, without a change of the compute mode, and writes the result. Raises MpsTransientError, OSError."""
    failure = None
    program = await asyncio.to_thread(identify, config.control.program, config.protocol, config.launcher)
    try:
        for left in DaemonRecords(state_dir / _RECORDS_NAME).uuids():  # an agent that was killed left it
            await _daemon(left, root, state_dir, config).vacate()
        daemon = _daemon(uuid, root, state_dir, config)
        try:
            await daemon.admit(_ALLOCATION, _SHARE)
            await daemon.remove(_ALLOCATION)
        finally:
            await daemon.vacate()
    except MpsTransientError:
        raise
    except MpsError as error:
        failure = f"an MPS daemon was tried on GPU {uuid} and does not work: {error}"
    result = ProbeResult(program=program, boot=boot_id(), failure=failure)
    await asyncio.to_thread(replace_file, state_dir / RESULT_NAME, msgspec.json.encode(result))
    log.info("mps_probed", gpu=uuid, works=failure is None, reason=failure)


def _daemon(uuid: str, root: Path, state_dir: Path, config: DaemonConfig) -> Daemon:
    """The daemon for the trial. It has a folder and a record of its own, so that no other part takes it for a daemon of containers."""
    records = DaemonRecords(state_dir / _RECORDS_NAME)
    return Daemon(uuid, folder_of(root), records, replace(config, exclusive=False))


def folder_of(root: Path) -> GpuFolder:
    """The folder of the daemon that is tried. `root`: the folder of all daemons."""
    return GpuFolder(root / "probe")
