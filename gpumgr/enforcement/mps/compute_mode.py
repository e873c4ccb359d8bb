"""The compute mode of a GPU that MPS shares: EXCLUSIVE_PROCESS, so that only clients of its MPS daemon get contexts.

The former mode is on record until it is restored, by a later agent process if necessary.
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
    """The driver's compute mode of a GPU in NVML's numbers. Both methods raise GpumgrError."""

    async def compute_mode(self, uuid: str) -> int: ...

    async def set_compute_mode(self, uuid: str, mode: int) -> None: ...


async def set_exclusive(modes: ComputeModes, uuid: str, records: DaemonRecords) -> None:
    """Sets EXCLUSIVE_PROCESS, and puts the former mode into the GPU's record, which must exist. Existing contexts stay.

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
            f"GPU {uuid} can't be put in compute mode EXCLUSIVE_PROCESS, so containers could use the GPU outside of MPS: {error}; "
            "run gpumgr as root, or set mps.exclusive_process to false"
        ) from error


async def restore_mode(modes: ComputeModes, uuid: str, records: DaemonRecords) -> None:
    """Restores the former mode if gpumgr changed it. Raises MpsError; call it again."""
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
