"""The compute mode of a GPU that MPS shares: EXCLUSIVE_PROCESS, so that a process that does not use the MPS daemon gets no context.

The former mode is on record until it is restored. An agent restores it even after a restart, or if mps.exclusive_process is off by then.
"""

from typing import Final, Protocol

import structlog

from gpumgr.common.errors import GpumgrError, MpsError
from gpumgr.enforcement.mps.folders import DaemonRecords

#: NVML's nvmlComputeMode_t.
DEFAULT: Final = 0
EXCLUSIVE_PROCESS: Final = 3

log = structlog.get_logger(__name__)


class ComputeModes(Protocol):
    """Reads and sets the driver's compute mode of one GPU, as NVML's number. Both methods raise GpumgrError."""

    async def compute_mode(self, uuid: str) -> int: ...

    async def set_compute_mode(self, uuid: str, mode: int) -> None: ...


async def set_exclusive(modes: ComputeModes, uuid: str, records: DaemonRecords) -> None:
    """Sets EXCLUSIVE_PROCESS and records the former mode in the GPU's record, which must exist. Existing contexts stay.

    Raises MpsError: then the GPU must not be shared.
    """
    record = records.of(uuid)
    try:
        mode = await modes.compute_mode(uuid)
        if record is None or record.former_mode is None:
            records.set_former_mode(uuid, mode)
        if mode != EXCLUSIVE_PROCESS:
            await modes.set_compute_mode(uuid, EXCLUSIVE_PROCESS)
            log.info("compute_mode_set", gpu=uuid, mode=EXCLUSIVE_PROCESS, before=mode)
    except GpumgrError as error:
        raise MpsError(
            f"GPU {uuid} can't be put in compute mode EXCLUSIVE_PROCESS, without which containers could use the GPU without MPS: {error}; "
            "run gpumgr as root, or set mps.exclusive_process to false"
        ) from error


async def restore_mode(modes: ComputeModes, uuid: str, records: DaemonRecords) -> None:
    """Restores the former mode if gpumgr changed it. Raises MpsError; a later call retries."""
    record = records.of(uuid)
    former = record.former_mode if record else None
    if former is None:
        return
    try:
        if await modes.compute_mode(uuid) == EXCLUSIVE_PROCESS != former:
            await modes.set_compute_mode(uuid, former)
            log.info("compute_mode_set", gpu=uuid, mode=former, before=EXCLUSIVE_PROCESS)
    except GpumgrError as error:
        raise MpsError(
            f"the compute mode {former} of GPU {uuid} can't be restored: {error}; run `nvidia-smi -i {uuid} -c {former}`"
        ) from error
    records.set_former_mode(uuid, None)
