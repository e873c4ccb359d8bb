"""The compute mode of a shared GPU: EXCLUSIVE_PROCESS, so that a process without the daemon's address gets no context at all.

The mode before is on record until it is set again, so that an agent that begins anew, or one that is told to leave the mode alone,
brings it back.
"""

from typing import Final, Protocol

import structlog

from gpumgr.enforcement.mps.errors import MpsError
from gpumgr.enforcement.mps.records import Records
from gpumgr.errors import GpumgrError

#: NVML's nvmlComputeMode_t.
DEFAULT: Final = 0
EXCLUSIVE_PROCESS: Final = 3

log = structlog.get_logger(__name__)


class ComputeModes(Protocol):
    """The driver's setting for one GPU, by NVML's numbers. Both raise GpumgrError."""

    async def compute_mode(self, uuid: str) -> int: ...

    async def set_compute_mode(self, uuid: str, mode: int) -> None: ...


async def claim(modes: ComputeModes, uuid: str, records: Records) -> None:
    """EXCLUSIVE_PROCESS from here on. Contexts that exist stay, but none of whole-GPU tenants can: the GPU is shared.

    The GPU has a record. Raises MpsError: then it must not be shared.
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
            f"GPU {uuid} can't be put in compute mode EXCLUSIVE_PROCESS, without which its containers could get past MPS: {error}; "
            "run gpumgr as root, or set mps.exclusive_process to false to do without"
        ) from error


async def give_back(modes: ComputeModes, uuid: str, records: Records) -> None:
    """The mode before ours, if it was ours. Raises MpsError; it can be tried again."""
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
            f"GPU {uuid} can't be given back its compute mode {former}: {error}; `nvidia-smi -c {former}` can"
        ) from error
    records.set_former_mode(uuid, None)
