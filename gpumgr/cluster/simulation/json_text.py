"""Reads a list in JSON with the line of each element. All errors are InputError and name file and line. A repeated key is an error."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from gpumgr.common.errors import InputError

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_MOST_DIGITS: Final = 40


def short(text: str, most: int = 40) -> str:
    """The text for a message: with "?" for unprintable characters, and cut to `most` characters."""
    printed = "".join(each if each.isprintable() else "?" for each in text)
    return printed if len(printed) <= most else printed[: most - 3] + "..."


class JsonText:
    """The content of a file. Raises InputError if it is not JSON."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._counted = (0, 1)
        try:
            json.loads(text, parse_int=str)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {error.lineno}, column {error.colno}: it is not JSON: {error.msg}") from error
        except RecursionError as error:
            raise InputError(f"{file}: it is not JSON that can be read: it is nested too deeply") from error

    def place(self, at: int) -> str:
        """File and line of a position. It counts lines from the previous position if that is before this one."""
        start, line = self._counted if self._counted[0] <= at else (0, 1)
        self._counted = (at, line + self._text.count("\n", start, at))
        return f"{self._file}, line {self._counted[1]}"

    def elements(self) -> Iterator[tuple[int, Any]]:
        """The elements of the list, each with the position where it begins."""
        at = self._skipped(0)
        if self._text[at] != "[":
            raise InputError(f"{self.place(at)}: a list of objects is expected")
        at = self._skipped(at + 1)
        while self._text[at] != "]":
            value, end = self._decoded(at)
            yield at, value
            end = self._skipped(end)
            at = self._skipped(end + 1) if self._text[end] == "," else end

    def _decoded(self, at: int) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(self._text, at)
        except ValueError as error:
            raise InputError(f"{self.place(at)}: {error}") from error

    def _skipped(self, at: int) -> int:
        blanks = _BLANKS.match(self._text, at)
        return blanks.end() if blanks else at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{short(repeated)}' is there twice; keep one of them")
    return made


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"the number {short(text)} has more than {_MOST_DIGITS} digits")
    return int(text)


def _constant(name: str) -> float:
    raise ValueError(f"it is not JSON: {name} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_constant=_constant)
