"""The style of comments, docstrings and Markdown: `python -m tools.prose` (make prose) lists every banned word with file and line.

A newcomer must understand each sentence at first reading, so personifications, metaphors and words of no one meaning are banned.
Text in backquotes and fenced blocks is code or a quotation and is not checked; nor are the files of EXEMPT.
"""

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tools import PROJECT

#: Banned words (a pattern, matched as whole words, in any case) -> what is written instead.
BANNED: Final[Mapping[str, str]] = {
    r"tell|tells|telling|told": "log, report, publish, return or notify",
    r"hear|hears|heard|hearing": "receive or read",
    r"wish|wishes|wished": "request",
    r"whoever|whomever|whatever|nobody": "the role that is meant (a client, an operator, no container), or any",
    r"whose": "a relative clause, or the genitive",
    r"meanwhile": "in the meantime, or the event that ends the interval",
    r"(?-i:Law|Rule) \d+": "'Invariants:' with plain sentences",
    r"weather": "transient error, or delivery log",
    r"station": "builder of the object graph",
    r"doorman|doormen": "connection limit",
    r"errand|errands": "background call",
    r"ward": "registration table",
    r"stranger|strangers": "unattributed process",
    r"neighbour|neighbours|neighbor|neighbors": "the other container, GPU or process",
    r"offender|offenders": "container over its limit",
    r"podside": "API side",
    r"nodeface": "node status",
    r"whereabouts": "process ownership",
}
#: Paths (a file, or a folder with all that is in it) that others wrote, or that quote what is banned.
EXEMPT: Final = ("CHANGELOG.md", "proto", "tests/data", "gpumgr/_pb")

_WORDS: Final = [(re.compile(rf"(?<![\w`])(?:{words})(?![\w`])", re.IGNORECASE), instead) for words, instead in BANNED.items()]
_ANY: Final = re.compile("|".join(BANNED), re.IGNORECASE)
_QUOTED: Final = re.compile(r"(`+)[^`]+\1")
_FENCED: Final = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_AFTER_HASH: Final = re.compile(r"(?:^|(?<=\s))#(?!!).*", re.MULTILINE)
_AFTER_SLASHES: Final = re.compile(r"/\*.*?\*/|(?:^|(?<=\s))//.*?$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A banned word. `file` is relative to the source tree, `line` counts from 1."""

    file: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}: write {self.instead}"


def findings(root: Path = PROJECT) -> Iterator[Finding]:
    """Every banned word in the source tree, by file and line."""
    for file in files(root):
        yield from findings_in(file, (root / file).read_text(encoding="utf-8"))


def files(root: Path) -> list[Path]:
    """The files to check, relative to `root`, without those that .gitignore names and without the exempt ones."""
    ignored = [".git", *(line.strip("/\n") for line in (root / ".gitignore").read_text(encoding="utf-8").splitlines())]
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in sorted(folders) if not any(fnmatch(each, pattern) for pattern in ignored)]
        found += [(Path(folder) / name).relative_to(root) for name in sorted(names)]
    return [file for file in found if _kind(file) in _PROSE and not any(file.is_relative_to(each) for each in EXEMPT)]


def findings_in(file: Path, text: str) -> list[Finding]:
    """Of one file with this content."""
    if not _ANY.search(text):
        return []
    found = []
    for line, prose in _PROSE[_kind(file)](text):
        readable = _QUOTED.sub(_blank, prose)
        for words, instead in _WORDS:
            for match in words.finditer(readable):
                number = line + readable.count("\n", 0, match.start())
                found.append(Finding(file=file, line=number, word=match[0], instead=instead))
    return sorted(found, key=lambda each: (each.line, each.word))


def _kind(file: Path) -> str:
    return file.suffix or file.name


def _blank(quoted: re.Match[str]) -> str:
    """Line breaks stay, so that lines keep their numbers."""
    return "\n" * quoted[0].count("\n")


# -- where the prose of a file is: (its first line, its text) ---------------------------------------------------------------


def _python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(docstring)) as constant), *_]:
                    yield constant.lineno, docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    yield 1, _FENCED.sub(_blank, text)


def _after(comments: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, str]]]:
    def prose(text: str) -> Iterator[tuple[int, str]]:
        for match in comments.finditer(text):
            yield 1 + text.count("\n", 0, match.start()), match[0]

    return prose


#: Suffix of a file's name, or its name where it has none -> where its prose is.
_PROSE: Final[Mapping[str, Callable[[str], Iterator[tuple[int, str]]]]] = {
    ".py": _python,
    ".md": _markdown,
    **dict.fromkeys((".sh", ".toml", ".yaml", ".yml", ".service", "Makefile", "Dockerfile", "run"), _after(_AFTER_HASH)),
    **dict.fromkeys((".c", ".h", ".go", ".js", ".css"), _after(_AFTER_SLASHES)),
}


def main() -> None:
    found = list(findings())
    for each in found:
        print(each)
    print(f"{len(found)} banned words" if found else "no banned word", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
