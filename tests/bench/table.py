"""The measured figures as Markdown, and their place in docs/benchmarks.md.

tables.txt has every table. A field is the path of a figure in build/bench.json: `{agent.commit:pair}`. A row with `*` in its paths is
repeated for each key at that place, which `{*}` shows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

BEGIN, END = "<!-- figures: make bench-docs -->", "<!-- end of figures -->"
_TABLES: Final = Path(__file__).with_name("tables.txt")
_FIELD: Final = re.compile(r"\{([^{}:]+)(?::([^{}]+))?\}")


_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "pair": lambda row: f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}",
    "seconds": lambda row: f"{row['median_seconds']} s (worst of {row['samples']}: {row['worst_seconds']} s)",
    "thousands": lambda number: f"{number / 1000}",
    "largest": lambda numbers: f"{max(numbers)}",
    "crowd": lambda row: f"{row['bound_seconds']} / {row['running_seconds']}",
}


def markdown(figures: Mapping[str, Any]) -> str:
    """All tables of one run. Rows of a benchmark that was not run are left out, and a table is if its heading lacks a figure. Any other
    figure that the run lacks is a question mark."""
    blocks = _TABLES.read_text(encoding="utf-8").strip().split("\n\n")
    return "\n\n".join(filter(None, (_block(block.splitlines(), figures) for block in blocks)))


def _block(lines: list[str], figures: Mapping[str, Any]) -> str:
    heading, *rows = ([*_rows(line, figures)] for line in lines)
    if "?" in "".join(heading) or (rows and not any(rows[1:])):
        return ""
    return "\n".join([*heading, *(text for row in rows for text in row)])


def _rows(line: str, figures: Mapping[str, Any]) -> Iterator[str]:
    if any(figures.get(path.partition(".")[0]) is None for path, _ in _FIELD.findall(line.replace("{*}", ""))):
        return
    starred = re.search(r"\{([^{}*:]+)\.\*", line)
    for key in _figure(figures, starred[1]) or () if starred else ("",):
        fields = line.replace("{*}", key).replace(".*", f".{key}")
        yield _FIELD.sub(lambda found: _text(_figure(figures, found[1]), found[2] or ""), fields)


def _figure(figures: Any, path: str) -> Any:
    for key in path.split("."):
        try:
            figures = figures[int(key)] if isinstance(figures, list) else figures[key]
        except KeyError:
            return None
    return figures


def _text(figure: Any, style: str) -> str:
    if figure is None:
        return "?"
    return _FORMATS[style](figure) if style in _FORMATS else format(figure, style)


def put_into(document: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replaces the text between the two marks. Raises ValueError without them."""
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not found or not last:
        raise ValueError(f"{document} lacks the marks {begin} and {end}")
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
