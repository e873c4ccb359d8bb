"""The tables of all commands: without ruled lines, in colours on a terminal, and as plain text elsewhere."""

import sys
from typing import Final

import click
from rich.console import Console, RenderableType
from rich.table import Table

#: The width for plain text, so large that nothing is folded or cut.
UNBOUNDED: Final = 100_000
#: The least width of a table: on a narrower terminal its lines wrap, since columns of names would have no space.
MIN_WIDTH: Final = 80


def open_table(*columns: tuple[str, bool], header: bool = True) -> Table:
    """A table with these columns: heading, and whether the column has numbers, which are right-aligned and never cut."""
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=header)
    for heading, number in columns:
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def plain_text(content: RenderableType, *, width: int = UNBOUNDED) -> str:
    """The content as text without colours, and without blanks at the ends of lines."""
    console = Console(width=width, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as printed:
        console.print(content)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def show(content: RenderableType) -> None:
    """Prints the content in the width of the terminal, or without a terminal as plain text, one line for each row."""
    if sys.stdout.isatty():
        Console(width=max(Console().width, MIN_WIDTH), highlight=False).print(content)
    else:
        click.echo(plain_text(content))
