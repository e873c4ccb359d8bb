"""Keys that a person presses while a command draws its picture."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

#: Without a handler they would end the process at once, and the terminal would stay as the picture left it.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


async def until_pressed(key: str, work: Coroutine[Any, Any, None]) -> None:
    """Does the work until it is done, somebody presses the key, or the process is told to end. What the work raises is raised.

    Only for the process's main thread.
    """
    pressed = asyncio.Event()
    with _listening(key, pressed.set):
        working, waiting = asyncio.create_task(work), asyncio.create_task(pressed.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = working.done()
            working.cancel()
            waiting.cancel()
            await asyncio.wait({working, waiting})
    if ended:
        working.result()


@contextmanager
def _listening(key: str, pressed: Callable[[], None]) -> Iterator[None]:
    """Calls `pressed` on the running event loop; what is typed is not shown. Where nobody can type nothing is heard. Ctrl-C stays
    what it is."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        try:
            typed = os.read(keyboard, 1024)
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone
            loop.remove_reader(keyboard)
        if not typed or key.encode() in typed:
            pressed()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    for number in _ENDING:
        loop.add_signal_handler(number, pressed)
    try:
        yield
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
