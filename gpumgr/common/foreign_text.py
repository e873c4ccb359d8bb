"""Decodes JSON and YAML that other programs wrote. Any text gives a value, or raises UnreadableText and no other error. If a JSON object
has a key twice, the last value counts, as in Go."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

import msgspec
import yaml

T = TypeVar("T")

#: Far more levels of nesting than Kubernetes objects have. The decoders fail at about a thousand.
MAX_DEPTH: Final = 100
#: The most characters of an error message. It may quote a key of any length, and is shown in logs, events and refusals.
_MAX_MESSAGE: Final = 400
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A string or a bracket. An unterminated string extends to the end of the text. `*+` forbids backtracking, so the time is linear.
_JSON_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
#: Longer objects of the API server are parsed on a thread. Parsing this many bytes takes up to 20 ms.
LONG_BYTES: Final = 1 << 16
#: PyYAML needs quadratic time for numbers to base 60 (1:30:00), so the colons of a value without quotes are limited.
_MAX_SEXAGESIMAL: Final = 100


class UnreadableText(ValueError):
    """The text can't be decoded. The message is one line."""

    def __init__(self, error: Exception | str) -> None:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        super().__init__(text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}...")


class WrongStructure(UnreadableText):
    """The text is JSON or YAML, but its values are not of the expected types."""


@overload
def decode_json(text: bytes | str | msgspec.Raw) -> Any: ...
@overload
def decode_json(text: bytes | str | msgspec.Raw, kind: type[T]) -> T: ...
def decode_json(text: bytes | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Raises UnreadableText if the text is not JSON, WrongStructure if its values do not match `kind`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise WrongStructure(error) from error
    except Exception as error:
        raise UnreadableText(error) from error


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except Exception as error:
        raise WrongStructure(error) from error


def decode_yaml(text: bytes | str, *, max_bytes: int) -> list[Any]:
    """Returns the non-empty documents. Tries the JSON decoder first: JSON is also YAML, and this decoder takes a hundredth of the time.
    Raises UnreadableText."""
    if len(text) > max_bytes:
        raise UnreadableText(f"it has more than {max_bytes} bytes")
    try:
        return [document for document in (decode_json(text),) if document is not None]
    except UnreadableText:
        pass
    try:
        _check_yaml(text)
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    except UnreadableText:
        raise
    except Exception as error:  # PyYAML also raises other errors, for example for a number of thousands of digits
        raise UnreadableText(error) from error


def _check_yaml(text: bytes | str) -> None:
    """Checks the parser's events before any Python object is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableText(
                f"it has the alias *{event.anchor}, which is not allowed, since aliases can multiply; write the value itself"
            )
        if (
            isinstance(event, yaml.ScalarEvent)
            and event.implicit[0]
            and event.value[_MAX_SEXAGESIMAL:].count(":") > _MAX_SEXAGESIMAL
        ):
            raise UnreadableText(
                f"it has a value without quotes that has more than {_MAX_SEXAGESIMAL} colons, {event.value[:20]}...; put it in quotes"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UnreadableText(f"it is nested more than {MAX_DEPTH} levels deep")


# -- objects of the API server -----------------------------------------------------------------------------------------------


@overload
def decode_stored(text: bytes | msgspec.Raw) -> Any: ...
@overload
def decode_stored(text: bytes | msgspec.Raw, kind: type[T]) -> T: ...
def decode_stored(text: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """Decodes an object that the API server stored, even if a part of it is not strict JSON. Otherwise a user could hide an object from
    gpumgr by a fault in a part that gpumgr does not read.

    If the strict decoder fails, values deeper than MAX_DEPTH, NaN and Infinity become null, and halves of surrogate pairs become "?".
    Raises UnreadableText.
    """
    try:
        return decode_json(text, kind)
    except WrongStructure:
        raise
    except UnreadableText:
        flat = _flattened(bytes(text))
    try:
        return decode_json(flat, kind)
    except WrongStructure:
        raise
    except UnreadableText as error:
        try:
            mended = json.dumps(json.loads(flat, parse_constant=lambda _: None), ensure_ascii=False).encode(errors="replace")
        except Exception:
            raise error from None
        return decode_json(mended, kind)


async def on_thread_if_long(parse: Callable[[msgspec.Raw], T], text: msgspec.Raw, long_bytes: int = LONG_BYTES) -> T:
    """Parses a text with more than `long_bytes` on a thread, because the longest texts would block the event loop for half a second."""
    return await asyncio.to_thread(parse, text) if memoryview(text).nbytes > long_bytes else parse(text)


async def decode_answer(text: bytes, kind: type[T]) -> T:
    """Like `decode_stored`, but if the strict decoder fails, the slow repair runs on a thread."""
    try:
        return decode_json(text, kind)
    except WrongStructure:
        raise
    except UnreadableText:
        return await asyncio.to_thread(decode_stored, text, kind)


def _flattened(text: bytes) -> bytes:
    """Replaces each list and object deeper than MAX_DEPTH by null. Works on tokens, because every recursive decoder has a limit."""
    kept, depth, start = [], 0, 0
    for token in _JSON_TOKEN.finditer(text):
        place = token.start()
        if text[place] in b"[{":
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += [text[start:place], b"null"]
        elif text[place] in b"]}":
            if depth == MAX_DEPTH + 1:
                start = token.end()
            depth -= 1
    if depth <= MAX_DEPTH:
        kept.append(text[start:])
    return b"".join(kept)
