"""Resetting one GPU. NVML has no call for it: the driver's program nvidia-smi does it, while nobody has the GPU open, we neither."""

import asyncio
import shutil
from contextlib import suppress
from typing import Final

from gpumgr.errors import NvmlError
from gpumgr.nvml.monitor import Monitor

#: The driver is let go for a minute at most: so long the program may take, and the rest is for ending our session and beginning anew.
PROGRAM_SECONDS: Final = 45.0
#: What a killed program that is inside the driver may take to end; then it is left to itself.
_END_SECONDS: Final = 2.0


async def reset_gpu(monitor: Monitor, uuid: str, *, program: str, timeout_seconds: float = PROGRAM_SECONDS) -> str:
    """What the program said. Raises NvmlError, with its own words if it refused.

    Which GPUs can be reset alone (not all that NVLink joins can), and in which state, only the program knows.
    """
    if shutil.which(program) is None:
        raise NvmlError(f"{program} is not in PATH: install the driver's programs, or name it with nvml.smi_program")
    async with monitor.let_go():
        code, said = await _run(program, "--gpu-reset", "-i", uuid, timeout_seconds=timeout_seconds)
    if code:
        raise NvmlError(f"{program} says (exit code {code}): {said or 'nothing'}{_advice(said, uuid, program)}")
    return said


async def _run(program: str, *arguments: str, timeout_seconds: float) -> tuple[int, str]:
    """Exit code and all that was printed. A session of its own, so that a Ctrl-C meant for us leaves a reset alone."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise NvmlError(f"{program} can't be run: {error.strerror or error}") from error
    try:
        async with asyncio.timeout(timeout_seconds):
            said, _ = await process.communicate()
    except TimeoutError as error:
        with suppress(ProcessLookupError, TimeoutError):
            process.kill()
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        raise NvmlError(
            f"{program} did not end within {timeout_seconds:g} s and was killed; whether the GPU was reset nobody knows"
        ) from error
    return process.returncode or 0, said.decode(errors="replace").strip()


def _advice(said: str, uuid: str, program: str) -> str:
    """Persistence mode counts as a user, though no process shows (NVIDIA/NVSentinel issue 1690)."""
    if "in use by another client" not in said.lower():
        return ""
    return (
        f"\nWho has it open: `fuser -v /dev/nvidia*`. Monitors such as DCGM must let go of it, and persistence mode must be off "
        f"(`{program} -pm 0 -i {uuid}`)."
    )
