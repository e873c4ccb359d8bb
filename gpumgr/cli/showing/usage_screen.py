"""Where the tables of `gpumgr usage` are shown: once, as plain text, or live on a terminal's other screen."""

import sys
from types import TracebackType
from typing import Final, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from gpumgr.cli.asking.documents import State
from gpumgr.cli.showing.amounts import clock_time
from gpumgr.cli.showing.usage_table import WIDE, usage_tables

#: Width of what is no terminal: nothing is folded or cut there.
_UNBOUNDED: Final = 100_000
#: Below this the columns of names would vanish; a narrower terminal breaks or cuts the lines.
_NARROWEST: Final = 80
_FOOT_ROWS: Final = 2


def on_terminal() -> bool:
    """Somebody watches, on something that can draw."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def print_usage(state: State) -> None:
    """Fits a terminal's width; elsewhere plain text without colour, a line for each row."""
    if sys.stdout.isatty():
        console = Console(width=max(Console().width, _NARROWEST), highlight=False)
        console.print(usage_tables(state, wide=console.width >= WIDE))
        return
    click.echo(usage_text(state, width=None))


def usage_text(state: State, *, width: int | None) -> str:
    """Without colour; `width` None: as wide as it is."""
    console = Console(width=max(width or _UNBOUNDED, _NARROWEST), highlight=False, force_terminal=False, color_system=None)
    with console.capture() as printed:
        console.print(usage_tables(state, wide=console.width >= WIDE))
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


class Screen:
    """The latest state on the other screen of the terminal, and whether it is still the agent's. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._state: State | None = None
        self._away: str | None = None
        self._first = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def show(self, state: State) -> None:
        self._state, self._away = state, None
        self._draw()

    def away(self, reason: str) -> None:
        """The agent went away; what was shown stays."""
        self._away = reason
        self._draw()

    def pressed(self, key: str) -> None:
        """A key of gpumgr.cli.showing.keyboard: those that move are followed."""
        page = self._room
        moves = {"up": -1, "down": 1, "page_up": -page, "page_down": page, " ": page, "home": -self._first, "end": _UNBOUNDED}
        if key in moves and self._state is not None:
            self._first += moves[key]
            self._draw()

    @property
    def _room(self) -> int:
        """Rows above the foot."""
        return max(1, self._console.height - _FOOT_ROWS)

    def _draw(self) -> None:
        self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """What fits from the first line that is to be seen, and two last lines: of when it is, and what does not fit."""
        parts: list[RenderableType] = []
        if self._away is not None:
            parts.append(Text(f"The agent is away, trying again: {self._away}", style="red"))
        if self._state is not None:
            parts.append(usage_tables(self._state, wide=self._console.width >= WIDE))
        options = self._console.options.update(width=max(self._console.width, _NARROWEST))
        lines = self._console.render_lines(Group(*parts), options, pad=False)
        self._first = max(0, min(self._first, len(lines) - self._room))
        shown = lines[self._first : self._first + self._room]
        part = f"; lines {self._first + 1}-{self._first + len(shown)} of {len(lines)}: cursor and page keys show the others"
        keys = Text("q quits" + (part if len(shown) < len(lines) else ""), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(SegmentLines(shown, new_lines=True), self._when(), keys)

    def _when(self) -> Text:
        """It stands still while the tables are scrolled."""
        moment = clock_time(self._state.at) if self._state is not None else "-"
        if self._away is None:
            return Text(moment, style="dim", no_wrap=True, overflow="ellipsis")
        return Text(f"The agent is away: this was at {moment}", style="red", no_wrap=True, overflow="ellipsis")
