"""Resets one GPU with nvidia-smi, since NVML has no call for it. No process may have the GPU open, this one included."""

import shutil
from typing import Final

from gpumgr.common.errors import NvmlError
from gpumgr.driver.monitor import Monitor
from gpumgr.driver.programs import run_program

#: The session is closed for a minute at most; the remaining time is for closing and reopening it.
PROGRAM_SECONDS: Final = 45.0


async def reset_gpu(monitor: Monitor, uuid: str, *, program: str, timeout_seconds: float = PROGRAM_SECONDS) -> str:
    """The program's output. Raises NvmlError, with that output if it refused.

    Whether a GPU can be reset alone (not all that NVLink joins can) is left to the program.
    """
    if shutil.which(program) is None:
        raise NvmlError(f"{program} is not in PATH: install the driver's programs, or name it with nvml.smi_program")
    async with monitor.without_session():
        try:
            code, output = await run_program(program, "--gpu-reset", "-i", uuid, timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            raise NvmlError(
                f"{program} did not end within {timeout_seconds:g} s and was killed; whether the GPU was reset is unknown"
            ) from error
        except OSError as error:
            raise NvmlError(f"{program} can't be run: {error.strerror or error}") from error
    if code:
        raise NvmlError(f"{program} failed (exit code {code}): {output or 'no output'}{_advice(output, uuid, program)}")
    return output


def _advice(output: str, uuid: str, program: str) -> str:
    """The remedy if the GPU is in use. Persistence mode counts as a user without a process (NVIDIA/NVSentinel issue 1690)."""
    if "in use by another client" not in output.lower():
        return ""
    return (
        f"\n`fuser -v /dev/nvidia*` lists the processes that have it open. Monitors such as DCGM must close it, and persistence mode "
        f"must be off (`{program} -pm 0 -i {uuid}`)."
    )
