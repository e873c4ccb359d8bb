"""Texts of other people on their way to a terminal: names, reasons and sentences that may hold anything.

Kubernetes bounds the names of pods, but not what a static pod, an operator's reason or a broken checkpoint brings here. What a
terminal would act on (escape sequences, line ends, marks that turn the direction of writing) is spelled out instead: `\\x1b`.
"""

import json
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text on one line, with all that is no visible character or space written as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(document: Any) -> Any:
    """JSON data with every text in it, keys too, made printable."""
    match document:
        case str():
            return printable(document)
        case Mapping():
            return {printable(str(key)): cleaned(value) for key, value in document.items()}
        case list() | tuple():
            return [cleaned(value) for value in document]
    return document


def json_line(document: Any) -> str:
    """The document as JSON on one line, all ASCII. JSON itself leaves DEL as it is."""
    return json.dumps(document).replace("\x7f", "\\u007f")
