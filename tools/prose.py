"""The style of comments, docstrings and Markdown: `python -m tools.prose` (make prose) lists what is banned, with file and line.

A newcomer must understand each sentence at first reading. So personifications, metaphors, words without one meaning, and constructions
that hide the subject of a sentence are banned.
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
    r"of (?:which|whom)": "a sentence of its own",
    r"those (?:that|which|who)": "the noun, with a relative clause",
    r"no more(?! than)": "no longer, or no further",
    r"stands": "is, or means",
    r"comes? from": "a verb that names the action (is read from, is sent by)",
}
#: Paths (a file, or a folder with all that is in it) that others wrote, or that quote what is banned.
EXEMPT: Final = ("CHANGELOG.md", "proto", "tests/data", "gpumgr/_pb")

#: A relative clause with more words than this must be read twice.
LONGEST_CLAUSE: Final = 25

_WORDS: Final = [(re.compile(rf"(?<![\w`])(?:{words})(?![\w`])", re.IGNORECASE), instead) for words, instead in BANNED.items()]
_OPENING: Final = re.compile(r"(?:^[\s*|>-]*|(?<=[.:;!?|] ))Of(?= )", re.MULTILINE)
_CLAUSE: Final = re.compile(rf"\b(?:that|where|which|who)(?:\s+[^\s.,;:()|]+){{{LONGEST_CLAUSE + 1}}}")
_CHECKS: Final = [*_WORDS, (_OPENING, "the subject first"), (_CLAUSE, "two sentences")]
#: A file without any of these is not parsed.
_ANY: Final = [re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE), re.compile(r"\bOf "), _CLAUSE]
_QUOTED: Final = re.compile(r"(`+)[^`]+\1")
_FENCED: Final = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_AFTER_HASH: Final = re.compile(r"(?:^|(?<=\s))#(?!!).*", re.MULTILINE)
_AFTER_SLASHES: Final = re.compile(r"/\*.*?\*/|(?:^|(?<=\s))//.*?$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Banned words. `file` is relative to the source tree, `line` counts from 1."""

    file: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}: write {self.instead}"


def findings(root: Path = PROJECT) -> Iterator[Finding]:
    """All findings in the source tree, by file and line."""
    for file in files(root):
        yield from findings_in(file, (root / file).read_text(encoding="utf-8"))


def files(root: Path) -> list[Path]:
    """The files to check, relative to `root`, without the ones that .gitignore names and without the exempt ones."""
    ignored = [".git", *(line.strip("/\n") for line in (root / ".gitignore").read_text(encoding="utf-8").splitlines())]
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in sorted(folders) if not any(fnmatch(each, pattern) for pattern in ignored)]
        found += [(Path(folder) / name).relative_to(root) for name in sorted(names)]
    return [file for file in found if _kind(file) in _PROSE and not any(file.is_relative_to(each) for each in EXEMPT)]


def findings_in(file: Path, text: str) -> list[Finding]:
    """The findings in a file with this content."""
    if not any(each.search(text) for each in _ANY):
        return []
    found = []
    for line, prose in _PROSE[_kind(file)](text):
        readable = _QUOTED.sub(_blank, prose)
        for banned, instead in _CHECKS:
            for match in banned.finditer(readable):
                number = line + readable.count("\n", 0, match.start())
                found.append(Finding(file=file, line=number, word=match[0].strip(), instead=instead))
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
    first, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line != first + len(block):
                yield first, "\n".join(block)
                block = []
            first = first if block else line
            block.append(token.string.lstrip("#:! "))
    yield first, "\n".join(block)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    yield 1, _FENCED.sub(_blank, text)


def _after(comments: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, str]]]:
    def prose(text: str) -> Iterator[tuple[int, str]]:
        for match in comments.finditer(text):
            yield 1 + text.count("\n", 0, match.start()), match[0].lstrip("#:/* ")

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
    print(f"{len(found)} findings", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
