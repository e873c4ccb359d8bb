"""Finds the names and levels of log events in the source."""

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import Final

from tools import PROJECT

PACKAGE: Final = PROJECT / "gpumgr"

#: Method of the log -> level, the lowest level first.
_LEVELS: Final = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}


@functools.cache
def events() -> Mapping[str, str]:
    """Event name -> its level, or levels. Raises ValueError for a name that is no literal."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        if "_pb" not in file.parts:
            for name, levels in events_in(file.read_text(encoding="utf-8")):
                found.setdefault(name, set()).update(levels)
    return {
        name: " or ".join(level for level in dict.fromkeys(_LEVELS.values()) if level in found[name]) for name in sorted(found)
    }


def events_in(source: str) -> Iterator[tuple[str, set[str]]]:
    """(name, levels) of the calls in a module: `log.info("name")`; `write("name")`, where `write` is a variable that holds a method of
    the log; `f(log.info, "name")`."""
    nodes = list(ast.walk(ast.parse(source)))
    given: dict[str, set[str]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if levels := _levels(value, {}):
                given[name] = levels
    for node in nodes:
        match node:
            case ast.Call(func=function, args=[first, *_]) if levels := _levels(function, given):
                yield _text(first), levels
            case ast.Call(args=[method, first, *_]) if levels := _levels(method, given):
                yield _text(first), levels


def _levels(node: ast.expr, given: Mapping[str, set[str]]) -> set[str]:
    """The levels of a method of the log, of a choice between two, or of a variable that holds one; empty for anything else."""
    match node:
        case ast.Attribute(value=ast.Name(id="log" | "_log") | ast.Attribute(attr="_log"), attr=method) if method in _LEVELS:
            return {_LEVELS[method]}
        case ast.IfExp(body=one, orelse=other):
            return _levels(one, given) | _levels(other, given)
        case ast.Name(id=name):
            return given.get(name, set())
    return set()


def _text(node: ast.expr) -> str:
    """Raises ValueError for a name that is not a literal: a search of the source would not find it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
    raise ValueError(f"line {node.lineno}: the name of a log event is no literal: {ast.unparse(node)}")
