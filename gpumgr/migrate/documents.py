"""Texts that are JSON or YAML, from anywhere: what comes of them is never much larger than they are."""

from typing import Any, Final

import msgspec
import yaml

from gpumgr.errors import InputError

#: What YAML's loaders raise for texts that are none: a value that is not what its tag says is any of these.
_NO_YAML: Final = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Levels of lists and maps in one another. Kubernetes' objects have less than half of it; libyaml takes quadratic time for many, and
#: PyYAML's binding to it recurses until the stack ends.
_MAX_DEPTH: Final = 100


def read_documents(text: bytes | str) -> list[Any]:
    """All documents but empty ones. JSON, which is YAML too, is read as such first: that takes a hundredth of the time.

    Raises InputError with the reason alone; the caller knows what the text is.
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
    """Before anything is made of it. Raises InputError, or what stands in _NO_YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise InputError(
                f"it has the alias *{event.anchor}, and a few of those may stand for gigabytes; give what kubectl prints, which has none"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise InputError(f"it is nested more than {_MAX_DEPTH} levels deep")
