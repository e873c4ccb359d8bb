"""Tables without lines, and their text without a terminal."""

from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table

#: Without a terminal nothing is folded or cut.
UNBOUNDED: Final = 100_000


def open_table(*columns: tuple[str, bool]) -> Table:
    """Columns by heading; columns of numbers (True) are right-aligned and never cut."""
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, number in columns:
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def plain_text(content: RenderableType, *, width: int = UNBOUNDED) -> str:
    """Without colours, and without blanks at the ends of lines."""
    console = Console(width=width, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as printed:
        console.print(content)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
