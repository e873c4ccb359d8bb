"""Keys that a person presses while a command draws its picture: letters, and cursor and page keys by name (`up`, `page_down`).

A terminal sends those as sequences that begin with an escape. Source: ECMA-48, and XTerm Control Sequences, "PC-Style Function Keys".
"""

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

#: Without a handler they would end the process at once, and the terminal would stay as the picture left it.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)

_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|[^\x1b]")
_NAMES: Final = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page_up",
    "6~": "page_down",
    "7~": "home",
    "8~": "end",
}


def keys_of(typed: bytes) -> list[str]:
    """Keys without a name are left out."""
    found = _SEQUENCE.findall(typed.decode(errors="replace"))
    return [name for key in found if (name := key if len(key) == 1 else _NAMES.get(key[2:]))]


async def until_pressed(key: str, work: Coroutine[Any, Any, None], *, hear: Callable[[str], None]) -> None:
    """Does the work until it is done, somebody presses the key, or the process is told to end; `hear` gets each other key. What the
    work raises is raised.

    Only for the process's main thread.
    """
    pressed = asyncio.Event()
    with _listening(key, pressed.set, hear):
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
def _listening(key: str, pressed: Callable[[], None], hear: Callable[[str], None]) -> Iterator[None]:
    """Calls `pressed` and `hear` on the running event loop; what is typed is not shown. Where nobody can type nothing is heard.
    Ctrl-C stays what it is."""
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
        keys = keys_of(typed)
        if not typed or key in keys:
            pressed()
            return
        for other in keys:
            hear(other)

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
