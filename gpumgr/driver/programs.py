"""Runs programs beside the driver's library: nvidia-smi, and modprobe for the kernel modules."""

import asyncio
from contextlib import suppress
from typing import Final

import structlog

MODPROBE: Final = ("modprobe", "-a", "nvidia", "nvidia-uvm")
_MODPROBE_SECONDS: Final = 30.0
#: How long a killed program that is inside the driver may take to end; after that it is abandoned.
_END_SECONDS: Final = 2.0

log = structlog.get_logger()


async def run_program(*command: str, timeout_seconds: float) -> tuple[int, str]:
    """Exit code and output. Raises OSError if it can't be run, TimeoutError (one of these) after the program was killed.

    It has a session of its own, so that Ctrl-C in our terminal does not end a reset.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, TimeoutError):
                process.kill()
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
    return process.returncode or 0, output.decode(errors="replace").strip()


async def load_modules(command: tuple[str, ...] = MODPROBE, *, timeout_seconds: float = _MODPROBE_SECONDS) -> bool:
    """Runs the command and returns whether it succeeded. A failure is logged: no driver is installed, or permission is missing."""
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
