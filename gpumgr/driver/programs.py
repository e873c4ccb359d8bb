"""Runs modprobe, which loads the driver's kernel modules, and nvidia-smi, which resets a GPU."""

import asyncio
import shutil
from typing import Final

import structlog

from gpumgr.common.aio import kill_program
from gpumgr.common.errors import NvmlError
from gpumgr.driver.monitor import Monitor

MODPROBE: Final = ("modprobe", "-a", "nvidia", "nvidia-uvm")
_MODPROBE_SECONDS: Final = 30.0

log = structlog.get_logger()


async def run_program(*command: str, timeout_seconds: float) -> tuple[int, str]:
    """Returns (exit code, output). Raises OSError if the program can't be run, TimeoutError (an OSError) if it was killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the agent's terminal must not end a reset
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            output, _ = await process.communicate()
    finally:
        await kill_program(process)
    return process.returncode or 0, output.decode(errors="replace").strip()


async def load_modules(command: tuple[str, ...] = MODPROBE, *, timeout_seconds: float = _MODPROBE_SECONDS) -> bool:
    """Runs the command and returns whether it succeeded. A failure is logged."""
    text = " ".join(command)
    try:
        code, reason = await run_program(*command, timeout_seconds=timeout_seconds)
    except TimeoutError:
        code, reason = 1, f"no end within {timeout_seconds:g} s"
    except OSError as error:
        code, reason = 1, error.strerror or str(error)
    if code:
        log.warning("kernel_modules_not_loaded", command=text, reason=reason)
    else:
        log.info("kernel_modules_loaded", command=text)
    return not code


#: The time limit of nvidia-smi. With the default nvml.call_timeout_seconds, closing and reopening NVML's session take up to 26 s more.
_RESET_SECONDS: Final = 45.0


async def reset_gpu(monitor: Monitor, uuid: str, *, program: str, timeout_seconds: float = _RESET_SECONDS) -> str:
    """Resets the GPU and returns the program's output. If the program refuses, the NvmlError has its output: for example, some GPUs with
    NVLink can't be reset alone."""
    if shutil.which(program) is None:
        raise NvmlError(f"{program} is not in PATH: install the driver's programs, or set nvml.smi_program")
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
    """What the operator can do if the GPU is in use. nvidia-smi counts persistence mode as a user (NVIDIA/NVSentinel issue 1690)."""
    if "in use by another client" not in output.lower():
        return ""
    return (
        f"\n`fuser -v /dev/nvidia*` lists the processes that have the GPU open. Monitors such as DCGM must close it, and persistence mode "
        f"must be off (`{program} -pm 0 -i {uuid}`)."
    )
