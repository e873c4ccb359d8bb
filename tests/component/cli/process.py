"""A command as a process of its own, on a terminal of 80 columns and 24 lines."""

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
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "gpumgr"
from gpumgr.cli import main
main()
"""


class Process:
    """`out` is all that was printed so far; the terminal was `untouched` before it began."""

    def __init__(self, *arguments: str) -> None:
        self._arguments, self.out, self._news = arguments, "", asyncio.Event()

    async def __aenter__(self) -> Self:
        environ = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environ.pop(name, None)
        self._keyboard, self.tty = pty.openpty()
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.untouched = termios.tcgetattr(self.tty)
        command = (sys.executable, "-c", _PROGRAM, *self._arguments)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=self.tty, stdout=self.tty, stderr=self.tty, env=environ, start_new_session=True
        )
        asyncio.get_running_loop().add_reader(self._keyboard, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        asyncio.get_running_loop().remove_reader(self._keyboard)
        os.close(self._keyboard)
        os.close(self.tty)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def until(self, text: str, *, after: int = 0) -> int:
        """Waits until it has printed the text behind character `after`; returns where the text ends."""
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                while text not in self.out[after:]:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise AssertionError(f"{text!r} was not printed; what was: {self.out[after:]!r}") from error
        return self.out.index(text, after) + len(text)

    async def ended(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(_WAIT_SECONDS):
            return await self._process.wait()

    def _read(self) -> None:
        self.out += os.read(self._keyboard, 65536).decode(errors="replace")
        self._news.set()
