"""Values as text, and the tables of all commands.

A damaged checkpoint or an operator's reason can contain anything. So characters with an effect on a terminal (escape sequences, line ends,
bidirectional marks) are written as Python escapes: `\\x1b`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from gpumgr.common.units import BLOCK_BYTES, count_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def printable(text: str) -> str:
    """One line of text. Characters that are not printable become Python escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(document: Any) -> Any:
    """Makes every text printable, also keys."""
    match document:
        case str():
            return printable(document)
        case Mapping():
            return {printable(str(key)): cleaned(value) for key, value in document.items()}
        case list() | tuple():
            return [cleaned(value) for value in document]
    return document


def json_line(document: Any) -> str:
    """One line of ASCII JSON; json.dumps does not escape DEL."""
    return json.dumps(document).replace("\x7f", "\\u007f")


UNKNOWN: Final = "unknown"
_GIB: Final = 1 << 30
#: Mechanisms that limit nothing: "none", and MPS for containers that are exempt from limits.
_UNLIMITED: Final = ("none", "mps-open")


def clock_time(at: float) -> str:
    """UTC date and time; @SECONDS if no date has this value."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"@{at:g}"


def gibibytes(memory_bytes: int | None) -> str:
    return UNKNOWN if memory_bytes is None else f"{memory_bytes / _GIB:.1f}"


def memory_text(memory_bytes: int | None) -> str:
    return "unknown memory" if memory_bytes is None else f"{gibibytes(memory_bytes)} GiB"


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def blocks(count: int) -> str:
    return f"{count_text(count, 'memory block')} ({count * BLOCK_BYTES / _GIB:g} GiB)"


def limiting(mechanisms: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in mechanisms if name not in _UNLIMITED)


def limits_sentence(mechanisms: Sequence[str]) -> str:
    if names := limiting(mechanisms):
        return f"kept within its share by {' and '.join(names)}"
    return f"nothing keeps it within its share{' (mps-open: it is exempt)' if 'mps-open' in mechanisms else ''}"


# -- tables: without ruled lines, in colours on a terminal, and as plain text elsewhere ----------------------------------------

#: So wide that text is neither folded nor cut.
UNBOUNDED: Final = 100_000
#: Tables are at least this wide, because narrower columns have no space for names. A narrower terminal wraps the lines.
MIN_WIDTH: Final = 80


def open_table(*columns: tuple[str, bool], header: bool = True) -> "Table":
    """`columns`: heading, and whether it has numbers, which are right-aligned and never cut."""
    from rich.table import Table  # rich is imported in functions, because the agent needs only `printable`

    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=header)
    for heading, number in columns:
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def plain_text(content: "RenderableType", *, width: int = UNBOUNDED) -> str:
    """Text without colours, and without blanks at the ends of lines."""
    from rich.console import Console

    console = Console(width=width, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as printed:
        console.print(content)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def show(content: "RenderableType") -> None:
    """Prints in the terminal's width; without a terminal, one line of plain text per row."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(width=max(Console().width, MIN_WIDTH), highlight=False).print(content)
    else:
        click.echo(plain_text(content))
