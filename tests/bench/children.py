"""Programs beside a benchmark: each says on standard output that it is ready, and ends when its standard input does."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web


@contextmanager
def child(module: str, *words: object) -> Iterator[str]:
    """`python -m module words...` while the body runs; yields its first line. Raises RuntimeError if it ended instead."""
    command = [sys.executable, "-m", module, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"{module} ended with status {process.wait()} before it was ready")
        try:
            yield line.strip()
        finally:
            assert process.stdin is not None
            process.stdin.close()


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    """Its URL."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def serve(application: web.Application, ended: Callable[[], object]) -> None:
    """Prints the URL and the process id, and serves until `ended` returns."""
    async with serving(application) as url:
        print(f"{url} {os.getpid()}", flush=True)
        await asyncio.to_thread(ended)
