"""Loads the driver's kernel modules, if the settings allow it."""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

MODPROBE: Final = ("modprobe", "-a", "nvidia", "nvidia-uvm")
_TIMEOUT_SECONDS: Final = 30.0

log = structlog.get_logger()


async def load_modules(command: Sequence[str] = MODPROBE, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> bool:
    """Runs the command and returns whether it succeeded. A failure is logged: no driver is installed, or permission is missing."""
    text = " ".join(command)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
    except OSError as exc:
        log.warning("kernel_modules_not_loaded", command=text, reason=exc.strerror or str(exc))
        return False
    try:
        async with asyncio.timeout(timeout_seconds):
            _, errors = await process.communicate()
    except TimeoutError:
        log.warning("kernel_modules_not_loaded", command=text, reason=f"no end within {timeout_seconds:g} s")
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        log.warning("kernel_modules_not_loaded", command=text, reason=errors.decode(errors="replace").strip())
        return False
    log.info("kernel_modules_loaded", command=text)
    return True
