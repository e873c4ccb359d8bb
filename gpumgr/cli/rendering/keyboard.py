"""Keys while a command shows its screen: letters, and cursor and page keys by name (`up`, `page_down`).

A terminal sends cursor keys as escape sequences. Source: ECMA-48, and XTerm Control Sequences, "PC-Style Function Keys".
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

from gpumgr.common.aio import run_until

#: Without a handler they end the process before the terminal is restored.
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
    """The keys by name; others are left out."""
    found = _SEQUENCE.findall(typed.decode(errors="replace"))
    return [name for key in found if (name := key if len(key) == 1 else _NAMES.get(key[2:]))]


async def until_pressed(key: str, work: Coroutine[Any, Any, None], *, on_key: Callable[[str], None]) -> None:
    """Runs `work` until it is done, the key is pressed, or the process gets SIGTERM or SIGHUP; `on_key` gets each other key.

    Raises what the work raises. Only for the main thread.
    """
    pressed = asyncio.Event()
    with _listening(key, pressed.set, on_key):
        done = await run_until(pressed.wait(), work)
    if not done.cancelled():
        done.result()


@contextmanager
def _listening(key: str, pressed: Callable[[], None], on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `pressed` and `on_key` on the running event loop, without echo; does nothing without a terminal. Ctrl-C keeps its meaning."""
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
            on_key(other)

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
