"""The output of `gpumgr usage`: tables once, plain text, or live on the terminal's alternate screen."""

import sys
from typing import Final, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from gpumgr.agent.api import NodeState
from gpumgr.cli.rendering.formats import clock_time
from gpumgr.cli.rendering.tables import UNBOUNDED, plain_text
from gpumgr.cli.rendering.usage_table import WIDE, usage_tables

#: With less the columns of names have no space; a narrower terminal breaks or cuts the lines.
_MIN_WIDTH: Final = 80
_FOOTER_ROWS: Final = 2


def on_terminal() -> bool:
    """Whether the output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def print_usage(state: NodeState) -> None:
    """Fits the terminal's width; without a terminal plain text, one line per row."""
    if sys.stdout.isatty():
        console = Console(width=max(Console().width, _MIN_WIDTH), highlight=False)
        console.print(usage_tables(state, wide=console.width >= WIDE))
        return
    click.echo(usage_text(state, width=None))


def usage_text(state: NodeState, *, width: int | None) -> str:
    """Plain text; `width` None: without limit."""
    width = max(width or UNBOUNDED, _MIN_WIDTH)
    return plain_text(usage_tables(state, wide=width >= WIDE), width=width)


class Screen:
    """The latest state on the terminal's alternate screen, and whether the agent is available. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._state: NodeState | None = None
        self._unavailable: str | None = None
        self._first = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, state: NodeState) -> None:
        self._state, self._unavailable = state, None
        self._draw()

    def unavailable(self, reason: str) -> None:
        """The agent is unavailable; the last state stays on the screen."""
        self._unavailable = reason
        self._draw()

    def on_key(self, key: str) -> None:
        """Scrolls, if the key (of gpumgr.cli.rendering.keyboard) is one that scrolls."""
        page = self._visible_rows
        moves = {"up": -1, "down": 1, "page_up": -page, "page_down": page, " ": page, "home": -self._first, "end": UNBOUNDED}
        if key in moves and self._state is not None:
            self._first += moves[key]
            self._draw()

    @property
    def _visible_rows(self) -> int:
        """Rows above the footer."""
        return max(1, self._console.height - _FOOTER_ROWS)

    def _draw(self) -> None:
        self._live.update(self.content(), refresh=True)

    def content(self) -> RenderableType:
        """The visible lines, and a footer of two lines: the time of the state, and the keys."""
        parts: list[RenderableType] = []
        if self._unavailable is not None:
            parts.append(Text(f"The agent is unavailable, trying again: {self._unavailable}", style="red"))
        if self._state is not None:
            parts.append(usage_tables(self._state, wide=self._console.width >= WIDE))
        options = self._console.options.update(width=max(self._console.width, _MIN_WIDTH))
        lines = self._console.render_lines(Group(*parts), options, pad=False)
        self._first = max(0, min(self._first, len(lines) - self._visible_rows))
        shown = lines[self._first : self._first + self._visible_rows]
        part = f"; lines {self._first + 1}-{self._first + len(shown)} of {len(lines)}: cursor and page keys scroll"
        keys = Text("q quits" + (part if len(shown) < len(lines) else ""), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(SegmentLines(shown, new_lines=True), self._when(), keys)

    def _when(self) -> Text:
        """The footer's first line, which does not scroll."""
        moment = clock_time(self._state.at) if self._state is not None else "-"
        if self._unavailable is None:
            return Text(moment, style="dim", no_wrap=True, overflow="ellipsis")
        return Text(f"The agent is unavailable: this is from {moment}", style="red", no_wrap=True, overflow="ellipsis")
