"""The output of `gpumgr usage`: tables once, plain text, or live on the terminal's alternate screen."""

import sys
from typing import Final

import click
from rich.console import Console, Group
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from gpumgr.agent.api import NodeState
from gpumgr.cli.rendering.formats import clock_time
from gpumgr.cli.rendering.tables import UNBOUNDED, plain_text
from gpumgr.cli.rendering.usage_table import WIDE, usage_tables

#: With less the columns of names have no space; a narrower terminal breaks or cuts the lines.
_MIN_WIDTH: Final = 80


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


class Screen(Live):
    """The latest state on the terminal's alternate screen, and whether the agent is available; what does not fit is cut at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, screen=True, auto_refresh=False)
        self._state: NodeState | None = None

    def show(self, state: NodeState) -> None:
        self._state = state
        self._draw()

    def unavailable(self, reason: str) -> None:
        """The agent is unavailable; the last state stays on the screen."""
        self._draw(Text(f"The agent is unavailable, trying again: {reason}", style="red"))

    def _draw(self, *above: Text) -> None:
        tables = [usage_tables(self._state, wide=self.console.width >= WIDE)] if self._state is not None else []
        footer = f"{clock_time(self._state.at) if self._state is not None else '-'}   Ctrl-C quits"
        screen = Layout()
        screen.split_column(Layout(Group(*above, *tables)), Layout(Text(footer, style="dim", no_wrap=True), size=1))
        self.update(screen, refresh=True)
