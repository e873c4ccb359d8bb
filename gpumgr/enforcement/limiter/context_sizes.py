"""Measures how much memory a CUDA context takes on a GPU: a program makes one, and the driver reports the program's memory."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import structlog

from gpumgr.common.aio import kill_program
from gpumgr.common.errors import NvmlError
from gpumgr.enforcement import cuda_client
from gpumgr.placement.devices import GpuProcess

_TIMEOUT_SECONDS: Final = 10.0
#: A failed measurement is repeated after this time.
_RETRY_SECONDS: Final = 600.0

log = structlog.get_logger(__name__)


class ContextSizes:
    """`processes` returns a GPU's processes with their memory (None: not known), or raises NvmlError. `library`: libcuda's name or path."""

    def __init__(
        self, processes: Callable[[str], Awaitable[Sequence[GpuProcess] | None]], *, library: str = "libcuda.so.1"
    ) -> None:
        self._processes, self._library = processes, library
        self._sizes: dict[str, int] = {}
        #: For each GPU a lock (one measurement at a time), and when a failed one is repeated.
        self._measuring: dict[str, asyncio.Lock] = {}
        self._again: dict[str, float] = {}
        self._pids: set[int] = set()

    async def of(self, uuid: str) -> int:
        """The bytes of a context on this GPU; 0 if they can't be measured. Then a new context counts only from the driver's next sample
        on."""
        loop = asyncio.get_running_loop()
        async with self._measuring.setdefault(uuid, asyncio.Lock()):
            if uuid in self._sizes or loop.time() < self._again.get(uuid, 0.0):
                return self._sizes.get(uuid, 0)
            size_bytes, reason = 0, "the driver does not report it"
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    size_bytes = await self._measure(uuid)
            except TimeoutError:
                reason = f"it took more than {_TIMEOUT_SECONDS:g} s"
            except (NvmlError, OSError) as error:
                reason = str(error)
            if size_bytes:
                self._sizes[uuid] = size_bytes
            self._again[uuid] = loop.time() + _RETRY_SECONDS
            log.info("context_measured", gpu=uuid, bytes=size_bytes or None, reason=None if size_bytes else reason)
            return size_bytes

    def own_pids(self) -> Collection[int]:
        return tuple(self._pids)

    async def _measure(self, uuid: str) -> int:
        """Raises NvmlError, OSError."""
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            cuda_client.__file__,
            self._library,
            "wait",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        )
        assert program.stdout is not None
        self._pids.add(program.pid)
        try:
            if (said := (await program.stdout.readline()).decode(errors="replace").strip()) != cuda_client.READY:
                raise OSError(said or "the program that makes a context ended")
            used = [process.memory_bytes for process in await self._processes(uuid) or () if process.pid == program.pid]
            return (used[0] or 0) if used else 0
        finally:
            await kill_program(program)
            self._pids.discard(program.pid)
