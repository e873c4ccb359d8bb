"""Renders Markdown tables, and fills them in between marks. Pure."""

from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A line break in a cell becomes a space."""
    lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
    return "\n".join(lines)


def code(text: str) -> str:
    """The text as code; empty for an empty text."""
    return f"`{text}`" if text else ""


def fill(text: str, parts: Mapping[str, str]) -> str:
    """The text with each part between its marks, which replaces the previous one. Raises ValueError if marks are missing."""
    for name, part in parts.items():
        begin, end = marks(name)
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"the marks {begin} and {end} are missing: put both where the part belongs")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a part."""
    return f"<!-- {name}: make docs -->", f"<!-- end of {name} -->"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
