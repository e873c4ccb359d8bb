"""Reads JSON or YAML from untrusted files. The result is never much larger than the text."""

from typing import Any, Final

import msgspec
import yaml

from gpumgr.errors import InputError

#: Exceptions of YAML loaders for invalid texts: a value that does not match its tag raises any of these.
_NO_YAML: Final = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Maximum nesting of lists and maps. Kubernetes objects have less than half of it; libyaml takes quadratic time for deep nesting, and
#: PyYAML's binding to it recurses until the stack overflows.
_MAX_DEPTH: Final = 100


def read_documents(text: bytes | str) -> list[Any]:
    """All non-empty documents of a text. JSON, which is also YAML, is tried first: that takes a hundredth of the time.

    Raises InputError with the reason only; the caller knows the name of the text.
    """
    try:
        return [document for document in (msgspec.json.decode(text),) if document is not None]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        _check(text)
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    except _NO_YAML as error:
        raise InputError(" ".join(str(error).split())) from error


def _check(text: bytes | str) -> None:
    """Checks the events before any object is built. Raises InputError, or an exception of _NO_YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise InputError(
                f"it has the alias *{event.anchor}, and a few of those may stand for gigabytes; give what kubectl prints, which has none"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise InputError(f"it is nested more than {_MAX_DEPTH} levels deep")
