"""JSON with the line of each entry. All errors are InputError and name file and line; a key that an object has twice is one of them."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpumgr.errors import InputError
from gpumgr.simulate.texts import short

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_MOST_DIGITS: Final = 40
_KINDS: Final = {"[": "a list of objects", "{": "an object"}


class Entry(NamedTuple):
    """Of a list (`key` counts from 1) or of an object. `at`: where the value begins."""

    key: str
    at: int
    value: Any


class JsonText:
    """The content of a file."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._counted = (0, 1)

    def place(self, at: int) -> str:
        """The lines are counted from the last place on, if this one is behind it."""
        start, line = self._counted if self._counted[0] <= at else (0, 1)
        self._counted = (at, line + self._text.count("\n", start, at))
        return f"{self._file}, line {self._counted[1]}"

    def entries(self, opening: str, at: int = 0) -> Iterator[Entry]:
        """Of the list ("[") or of the object ("{") at this position. Nothing but blanks may follow one that begins the text."""
        first, closing = at == 0, {"[": "]", "{": "}"}[opening]
        at = self._after(opening, at, f"{_KINDS[opening]} is expected")
        keys: set[str] = set()
        while not self._text.startswith(closing, at):
            if keys:
                at = self._after(",", at, f"'{closing}' or ',' is expected")
            key = str(len(keys) + 1)
            if opening == "{":
                named = at
                if not self._text.startswith('"', at):
                    raise InputError(f"{self.place(at)}: it is not JSON: a key is expected")
                key, at = self._decoded(at)
                if key in keys:
                    raise InputError(f"{self.place(named)}: {_twice(key)}")
                at = self._after(":", at, "':' is expected")
            keys.add(key)
            value, end = self._decoded(at)
            yield Entry(key, at, value)
            at = self._skipped(end)
        if first and self._skipped(at + 1) < len(self._text):
            raise InputError(f"{self.place(self._skipped(at + 1))}: it is not JSON: nothing is expected after '{closing}'")

    def _decoded(self, at: int) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(self._text, at)
        except json.JSONDecodeError as error:
            raise InputError(f"{self.place(error.pos)}, column {error.colno}: it is not JSON: {error.msg}") from error
        except RecursionError as error:
            raise InputError(f"{self.place(at)}: it is nested too deeply") from error
        except ValueError as error:
            raise InputError(f"{self.place(at)}: {error}") from error

    def _after(self, sign: str, at: int, what: str) -> int:
        at = self._skipped(at)
        if not self._text.startswith(sign, at):
            raise InputError(f"{self.place(at)}: it is not JSON: {what}" if sign in ",:" else f"{self.place(at)}: {what}")
        return self._skipped(at + 1)

    def _skipped(self, at: int) -> int:
        blanks = _BLANKS.match(self._text, at)
        return blanks.end() if blanks else at


def _twice(key: str) -> str:
    return f"the key '{short(key)}' is there twice; keep one of them"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(_twice(next(key for key in keys if keys.count(key) > 1)))
    return made


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"the number {short(text)} has more than {_MOST_DIGITS} digits")
    return int(text)


def _constant(name: str) -> float:
    raise ValueError(f"it is not JSON: {name} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_constant=_constant)
