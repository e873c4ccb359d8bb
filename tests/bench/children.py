"""Programs beside a benchmark: each says on standard output that it is ready, and ends when its standard input does."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def child(module: str, *words: object, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """`python -m module words...` while the body runs; yields its first line. Raises RuntimeError if it ended instead."""
    command = [sys.executable, "-m", module, *map(str, words)]
    pipe, env = subprocess.PIPE, {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"{module} ended with status {process.wait()} before it was ready")
        try:
            yield line.strip()
        finally:
            assert process.stdin is not None
            process.stdin.close()
