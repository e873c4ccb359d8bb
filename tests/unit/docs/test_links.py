"""What the documents point to is there: files, chapters, events of the log."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from tests.docs.log_calls import PACKAGE, events

ROOT: Final = PACKAGE.parent
DOCUMENTS: Final = (
    "README.md",
    "CHANGELOG.md",
    "config/README.md",
    "config/migrate-from-gpu-manager.md",
    "config/migrate-from-hami.md",
    "tests/README.md",
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
)
_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_TARGET: Final = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
_FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CHAPTER: Final = re.compile(r"README(?:\.md)?, \"([^\"]+)\"")


def targets(document: Path) -> Iterator[str]:
    """Of its links and pictures."""
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


def test_every_document_is_looked_at() -> None:
    found = {
        str(file.relative_to(ROOT)) for folder in (".", ".github", "config", "tests") for file in (ROOT / folder).glob("*.md")
    }
    assert found == set(DOCUMENTS)


def test_chapters_that_the_code_names_are_there() -> None:
    named = {title for file in PACKAGE.rglob("*.py") for title in _CHAPTER.findall(file.read_text(encoding="utf-8"))}
    assert named
    assert named <= set(chapters(ROOT / "README.md"))


def test_the_readmes_events_are_the_logs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = text[text.index("| event |") :].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert len(named) > 5
    assert named <= events().keys()
