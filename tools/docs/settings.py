"""The tables of settings: key with default, meaning, and whether a change is live."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from gpumgr.settings.schema import is_live, sections
from tools import PROJECT
from tools.docs.markdown import code, table

#: Holds every key with its default and a comment (tests/unit/settings compares it with the schema).
SHIPPED: Final = PROJECT / "config" / "gpumgr.yaml"

_SECTION: Final = re.compile(r"(?P<name>\w+):$")
_KEY: Final = re.compile(r"  (?P<name>\w+): (?P<default>.*)$")


def settings_tables() -> str:
    """One table per section, in the order of the file. Raises KeyError for a setting that is missing in the file."""
    written = entries(SHIPPED.read_text(encoding="utf-8"))
    return "\n\n".join(_section(section, written) for section in sections())


def entries(text: str) -> Mapping[str, tuple[str, str]]:
    """Dotted key -> (its default as text, the comment before it), for a settings file with two levels."""
    return dict(_entries(text))


def _entries(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    section, comment = "", list[str]()
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section = found["name"]
        if found := _KEY.match(line):
            yield f"{section}.{found['name']}", (found["default"], " ".join(comment))
        comment = [*comment, line.removeprefix("  # ")] if line.startswith("  # ") else []


def _section(section: str, written: Mapping[str, tuple[str, str]]) -> str:
    rows = []
    for key, kind in sections()[section].items():
        default, comment = written[name := f"{section}.{key}"]
        rows.append((code(f"{name}: {default}"), f"{comment} *Live.*" if is_live(kind) else comment))
    return table((f"`{section}`", "meaning"), rows)
