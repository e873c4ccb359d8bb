"""What the documents point to is there: files, chapters, events of the log."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from tools.docs.log_calls import PACKAGE

ROOT: Final = PACKAGE.parent
DOCUMENTS: Final = tuple(
    sorted(
        str(file.relative_to(ROOT))
        for folder in (".", ".github", "config", "docs", "tests")
        for file in (ROOT / folder).glob("*.md")
    )
)
_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_TARGET: Final = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
_FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CHAPTER: Final = re.compile(r"(docs/[a-z-]+\.md), \"([^\"]+)\"")


def targets(document: Path) -> Iterator[str]:
    """The targets of its links and pictures."""
    for found in _TARGET.finditer(_CODE.sub("", document.read_text(encoding="utf-8"))):
        yield found[1] or found[2]


def chapters(document: Path) -> list[str]:
    return _HEADING.findall(_FENCED.sub("", document.read_text(encoding="utf-8")))


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document, broken = ROOT / name, []
    for target in targets(document):
        if re.match(r"https?://", target):
            continue
        path, _, wanted = unquote(target).partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (wanted and wanted not in map(anchor, chapters(file))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_table_has_its_head_and_rows_of_one_width(name: str) -> None:
    """An empty line ends a table: the rows after it would be shown as text."""
    text = _FENCED.sub("", (ROOT / name).read_text(encoding="utf-8"))
    for rows in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, rule, *_ = rows.splitlines()
        assert re.fullmatch(r"\|(-+\|)+", rule), head
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows.splitlines()} == {rule.count("|")}, head


def test_chapters_that_the_code_names_exist() -> None:
    named = {found for file in PACKAGE.rglob("*.py") for found in _CHAPTER.findall(file.read_text(encoding="utf-8"))}
    assert named
    assert [(name, title) for name, title in sorted(named) if title not in chapters(ROOT / name)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
