"""A command as a process of its own: on pipes, or on a terminal of 80 columns and 24 lines."""

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from typing import Final, Self

_WAIT_SECONDS: Final = 40.0
#: The child makes the terminal its own first, so that Ctrl-C reaches it as from a keyboard, and handles SIGINT, which a shell ignores
#: for its background jobs.
_PROGRAM: Final = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "terminal":
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[:2] = ["gpumgr"]
from gpumgr.cli import main
main()
"""


class Process:
    """`out` and `err` are all that was printed so far; a terminal has everything in `out`, and was `untouched` before it began."""

    def __init__(self, *arguments: str, terminal: bool) -> None:
        self._arguments, self._terminal = arguments, terminal
        self.out = self.err = ""
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        mode = "terminal" if self._terminal else "pipes"
        command = (sys.executable, "-c", _PROGRAM, mode, *self._arguments)
        environ = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environ.pop(name, None)
        if self._terminal:
            self.keyboard, self.tty = pty.openpty()
            fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            self.untouched = termios.tcgetattr(self.tty)
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=self.tty, stdout=self.tty, stderr=self.tty, env=environ, start_new_session=True
            )
            asyncio.get_running_loop().add_reader(self.keyboard, self._read_terminal)
        else:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ,
            )
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            self._readers = [
                asyncio.create_task(self._read(self._process.stdout, "out")),
                asyncio.create_task(self._read(self._process.stderr, "err")),
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(*self._readers)
        if self._terminal:
            asyncio.get_running_loop().remove_reader(self.keyboard)
            os.close(self.keyboard)
            os.close(self.tty)

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def until(self, text: str, *, stream: str = "out", after: int = 0) -> int:
        """Waits until it has printed the text behind character `after`; returns where the text ends."""
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                while text not in self._printed(stream)[after:]:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise AssertionError(f"{text!r} was not printed; what was: {self._printed(stream)[after:]!r}") from error
        return self._printed(stream).index(text, after) + len(text)

    def _printed(self, stream: str) -> str:
        return self.out if stream == "out" else self.err

    async def ended(self) -> int:
        """Its exit code, once it has ended and all that it wrote to pipes is read."""
        async with asyncio.timeout(_WAIT_SECONDS):
            code = await self._process.wait()
            await asyncio.gather(*self._readers)
            return code

    def _read_terminal(self) -> None:
        self._heard("out", os.read(self.keyboard, 65536))

    async def _read(self, pipe: asyncio.StreamReader, stream: str) -> None:
        while data := await pipe.read(65536):
            self._heard(stream, data)

    def _heard(self, stream: str, data: bytes) -> None:
        setattr(self, stream, getattr(self, stream) + data.decode(errors="replace"))
        self._news.set()
